"""Programs that are drawn, on ranks of several hosts, with threads that take turns wherever they can."""

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
)  # along with the comparison, begun with it, in one piece, in several
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
    """Threads take turns after each few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def drawn_act(drawn: random.Random, ranks: int) -> Act:
    """A collective that all ranks call, and what it comes to."""
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

    def act(communicator: Communicator) -> None:
        rank = communicator.rank
        first = sum(counts[:rank])
        mine = contributions(dtype, length, range(first, first + counts[rank]))
        everything = contributions(dtype, length, range(replicas))
        if kind == "all_reduce":
            assert_same_bits(communicator.ordered_all_reduce(mine, op=op), reduced(everything, op))
        elif kind == "scatter":
            whole = [np.resize(array, ranks * length // 5) for array in mine]
            expected = reduced([np.resize(array, ranks * length // 5) for array in everything], op).reshape(ranks, -1)
            assert_same_bits(communicator.ordered_reduce_scatter(whole, op=op), expected[rank])
        elif kind == "named":
            out = np.empty_like(mine[0])
            handle = communicator.start_ordered_all_reduce(mine, out, op, name="named")
            assert_same_bits(communicator.ordered_all_reduce(mine, op=op), reduced(everything, op))
            assert_same_bits(handle.wait(), reduced(everything, op))
        elif kind == "mismatch":
            out = np.zeros_like(mine[0])
            with pytest.raises(LayoutMismatchError):
                communicator.ordered_all_reduce(mine, out, name="bias" if rank == other else "kernel")
            assert not out.any()
        elif kind == "broadcast":
            buffer = contributions(dtype, length, [rank])[0].copy()
            assert_same_bits(communicator.broadcast(buffer, other), everything[other])
        else:
            gathered = communicator.all_gather(contributions(dtype, length, [rank])[0])
            assert_same_bits(gathered, np.stack(contributions(dtype, length, range(ranks))))

    return act


def assert_goes_well(hosts: tuple[int, ...], drawn: random.Random, acts: int) -> None:
    program = [drawn_act(drawn, len(hosts)) for _ in range(acts)]

    def run(communicator: Communicator) -> None:
        for act in program:
            act(communicator)

    run_on_threads(len(hosts), run, SETTINGS, hosts)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("hosts", LAYOUTS.values(), ids=LAYOUTS)
def test_whatever_ranks_call_one_after_another_comes_to_what_numpy_says(hosts: tuple[int, ...], seed: int) -> None:
    assert_goes_well(hosts, random.Random(f"{seed}/{hosts}"), 8)


@pytest.mark.complete
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("hosts", LAYOUTS.values(), ids=LAYOUTS)
def test_many_programs_come_to_what_numpy_says(hosts: tuple[int, ...], number: int, seed: int) -> None:
    assert_goes_well(hosts, random.Random(f"{seed}/{hosts}/{number}"), 40)
