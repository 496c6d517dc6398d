"""Where several steps may be one program."""

import pytest

from strategies.devices import choose_devices
from strategies.fused_steps import FusedSteps


@pytest.mark.parametrize(
    ("replicas", "instances", "suits"),
    [
        (1, 1, True),
        (2, 1, False),  # on simulated devices each would repeat the update
        (12, 1, False),  # in waves
        (1, 2, False),  # gradients leave the instance
    ],
)
def test_it_is_for_one_replica_of_one_instance_on_cpus(replicas, instances, suits):
    assert FusedSteps.suits(choose_devices(range(replicas)), instances) is suits
