"""Grid of replicas and the devices that each replica spans."""

import threading
from dataclasses import dataclass

import jax
import pytest

import strategies
from strategies.jax.replicas.devices import choose_grid


@dataclass(frozen=True)
class Accelerator:
    """A stand-in for a device of JAX."""

    number: int
    platform: str = "gpu"


def devices_of(grid):
    return [[device.number for device in column.devices] for column in grid.columns]


def test_one_device_per_replica_makes_a_grid_of_one_column():
    assert choose_grid(range(2, 5)).columns == (choose_grid(range(2, 5)).first,)


def test_a_strategy_has_a_column_for_each_device_of_a_replica():
    strategy = strategies.IPUStrategy(2, ipus_per_replica=3)
    assert strategy.instance.ipus_per_replica == strategy.replicas.grid.ipus_per_replica == 3
    assert strategy.replicas.devices is strategy.replicas.grid.first
    assert strategy.replicas.grid.replicas == strategy.local_replicas == range(2)


def test_a_replica_spans_one_device_by_default():
    assert strategies.IPUStrategy(2).replicas.grid.ipus_per_replica == 1


@pytest.mark.parametrize(("number", "error"), [(0, ValueError), (1.5, TypeError), (True, TypeError)])
def test_a_replica_spans_one_device_at_least(number, error):
    with pytest.raises(error, match="ipus_per_replica"):
        strategies.IPUStrategy(1, ipus_per_replica=number)


def test_columns_on_a_cpu_share_one_device_and_have_their_own_threads():
    grid = choose_grid(range(2), ipus_per_replica=2)
    assert {device for column in grid.columns for device in column.devices} == {jax.local_devices()[0]}
    meet = threading.Barrier(4, timeout=60)  # opens only if all four run at once

    def work(position):
        meet.wait()
        return threading.get_ident()

    futures = [future for column in grid.columns for future in column.begin(work)]
    assert len({future.result(60) for future in futures}) == 4


@pytest.mark.parametrize(
    ("replicas", "local_index", "ipus", "columns"),
    [
        (range(2), 0, 2, [[0, 2], [1, 3]]),
        (range(1), 0, 4, [[0], [1], [2], [3]]),
        (range(1, 2), 1, 2, [[2], [3]]),
        (range(4), 0, 2, [[0, 2], [1, 3]]),  # in two waves
        (range(1), 0, 5, [[0], [1], [2], [3], [0]]),  # one of four serves twice
    ],
)
def test_accelerators_of_a_replica_are_adjacent(replicas, local_index, ipus, columns, monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [Accelerator(number) for number in range(4)])
    assert devices_of(choose_grid(replicas, local_index, ipus_per_replica=ipus)) == columns


SAYS = """
import strategies
print(strategies.PopDistStrategy().replicas.grid.ipus_per_replica)
print(strategies.PopDistStrategy(ipus_per_replica=3).replicas.grid.ipus_per_replica)
try:
    strategies.PopDistStrategy(ipus_per_replica=2)
except ValueError as error:
    print(error)
"""


def test_poprun_sets_the_devices_per_replica(in_new_process):
    environ = {
        "POPDIST_NUM_TOTAL_REPLICAS": "1",
        "POPDIST_NUM_IPUS_PER_REPLICA": "3",
        "POPDIST_NUM_LOCAL_REPLICAS": "1",
        "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE": "1",
        "POPDIST_REPLICA_INDEX_OFFSET": "0",
        "POPDIST_LOCAL_INSTANCE_INDEX": "0",
    }
    *numbers, refusal = in_new_process(SAYS, **environ).splitlines()
    assert numbers == ["3", "3"]
    assert refusal.startswith("ipus_per_replica is 2, but poprun says 3; leave it out, or start the job with")


@pytest.mark.complete
def test_the_strategy_sets_devices_per_replica_without_poprun(in_new_process):
    program = (
        "import strategies\n"
        "try:\n    strategies.PopDistStrategy(ipus_per_replica=0)\nexcept ValueError as error:\n    print(error)\n"
        "print(strategies.PopDistStrategy(ipus_per_replica=2).replicas.grid.ipus_per_replica)\n"
    )
    refusal, number = in_new_process(program).splitlines()
    assert refusal.startswith("ipus_per_replica is 0")
    assert number == "2"
