"""Random programs on ranks of several hosts, with threads that switch as often as possible."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from losing import LIMITS
from reference import contributions, reduced
from statements import assert_same_bits

from collectives import Communicator, LayoutMismatchError, Settings, run_on_threads

SETTINGS = Settings(mechanism="window", limits=LIMITS)
LENGTHS = (
    5,
    900,
    17_000,
    40_000,
    90_000,
    700_000,
)  # sent with the comparison, begun with it, in one piece, in several
LAYOUTS = {
    "two by two": (0, 0, 1, 1, 2, 2),
    "uneven": (0, 0, 0, 1, 2, 2),
    "mixed up": (0, 1, 0, 2, 1),
    "two hosts": (0, 1, 1),
    "more than eight": (*range(9), 0, 3),
    "one": (0, 0, 0),
}

Act = Callable[[Communicator], None]


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """Let threads switch after every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def drawn_act(drawn: random.Random, ranks: int) -> Act:
    """Return a random collective that all ranks call and check."""
    length, dtype, op = (
        drawn.choice(LENGTHS),
        drawn.choice(["float32", "bfloat16", "int32"]),
        drawn.choice(["sum", "mean"]),
    )
    counts = (
        [drawn.choice([1, 1, 2, 3]) for _ in range(ranks)] if drawn.random() < 0.4 else [drawn.choice([1, 2])] * ranks
    )
    other = drawn.randrange(ranks)
    kind = drawn.choice(["all_reduce", "all_reduce", "scatter", "named", "mismatch", "broadcast", "gather"])
    replicas = sum(counts)
    everything = contributions(dtype, length, range(replicas))
    if kind == "scatter":
        everything = [np.resize(array, ranks * length // 5) for array in everything]
    expected = reduced(everything, op) if kind in ("all_reduce", "scatter", "named") else everything[other]

    def act(communicator: Communicator) -> None:
        rank = communicator.rank
        first = sum(counts[:rank])
        mine = everything[first : first + counts[rank]]
        if kind == "all_reduce":
            assert_same_bits(communicator.ordered_all_reduce(mine, op=op), expected)
        elif kind == "scatter":
            block = expected.reshape(ranks, -1)[rank]
            assert_same_bits(communicator.ordered_reduce_scatter(mine, op=op), block)
        elif kind == "named":
            out = np.empty_like(mine[0])
            handle = communicator.start_ordered_all_reduce(mine, out, op, name="named")
            assert_same_bits(communicator.ordered_all_reduce(mine, op=op), expected)
            assert_same_bits(handle.wait(), expected)
        elif kind == "mismatch":
            out = np.zeros_like(mine[0])
            with pytest.raises(LayoutMismatchError):
                communicator.ordered_all_reduce(mine, out, name="bias" if rank == other else "kernel")
            assert not out.any()
        elif kind == "broadcast":
            buffer = everything[rank].copy()
            assert_same_bits(communicator.broadcast(buffer, other), expected)
        else:
            gathered = communicator.all_gather(everything[rank])
            assert_same_bits(gathered, np.stack(everything[:ranks]))

    return act


def assert_goes_well(hosts: tuple[int, ...], drawn: random.Random, acts: int) -> None:
    program = [drawn_act(drawn, len(hosts)) for _ in range(acts)]

    def run(communicator: Communicator) -> None:
        for act in program:
            act(communicator)

    run_on_threads(len(hosts), run, SETTINGS, hosts)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("hosts", LAYOUTS.values(), ids=LAYOUTS)
def test_a_random_program_gives_the_results_of_numpy(hosts: tuple[int, ...], seed: int) -> None:
    assert_goes_well(hosts, random.Random(f"{seed}/{hosts}"), 8)


@pytest.mark.complete
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("hosts", LAYOUTS.values(), ids=LAYOUTS)
def test_many_random_programs_give_the_results_of_numpy(hosts: tuple[int, ...], number: int, seed: int) -> None:
    assert_goes_well(hosts, random.Random(f"{seed}/{hosts}/{number}"), 20)
