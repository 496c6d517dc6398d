"""The device of each instance in a simulated V-IPU partition."""

from __future__ import annotations

import pytest

from poprun.cli.settings import LaunchSettings
from poprun.errors import UsageError
from poprun.launch.placement import device_ids


def need(replicas, per_replica, instances, **options):
    numbers = {"num_replicas": replicas, "ipus_per_replica": per_replica, "num_instances": instances}
    return LaunchSettings(("p",), **numbers, **{"vipu_partition": "p"} | options)


def test_devices_equal_the_public_sample():
    """The original documentation shows the devices 24 to 27 for four instances with four IPUs each."""
    assert device_ids(need(16, 1, 4)) == (24, 25, 26, 27)


@pytest.mark.parametrize(
    ("ipus", "instances", "devices"),
    [
        (1, 1, [0]),
        (2, 2, [0, 1]),
        (2, 1, [2]),
        (8, 8, range(8)),
        (8, 4, range(8, 12)),
        (16, 1, [30]),
        (64, 2, [124, 125]),
    ],
)
def test_devices_of_one_size_are_numbered_after_all_smaller_ones(ipus, instances, devices):
    assert device_ids(need(ipus, 1, instances)) == tuple(devices)


@pytest.mark.parametrize(
    ("replicas", "per_replica", "nearest"), [(6, 1, "4 or 8"), (3, 4, "8 or 16"), (5, 5, "16 or 32")]
)
def test_a_size_other_than_a_power_of_two_is_refused(replicas, per_replica, nearest):
    with pytest.raises(UsageError, match=f"the size of a partition must be a power of two: use {nearest} "):
        device_ids(need(replicas, per_replica, 1))


def test_a_device_map_is_refused():
    with pytest.raises(UsageError, match=r"^--vipu-partition m\.toml: there are no device maps any more; give a name$"):
        device_ids(need(4, 1, 4, vipu_partition="m.toml"))
