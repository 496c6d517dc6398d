"""Events that instruments see of collectives and phases, their order, and the absence of calls without instruments."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

import collectives
from collectives import Communicator, LayoutMismatchError, Settings, run_on_threads
from collectives.calls import Call
from collectives.instruments import DATA, EXCHANGE, PHASES, UPDATE, Instruments, is_seen

LIMIT_S = 60.0
MECHANISMS = pytest.mark.parametrize("mechanism", ["ring", "window"])


class Everything:
    """An instrument that records all events by thread; each thread is a rank.

    Attributes:
        has_waited: Set when rank 1 is waited for; rank 1 may wait for others itself while it connects.
    """

    def __init__(self) -> None:
        self._seen: dict[int, list[tuple[object, ...]]] = {}
        self.has_waited = threading.Event()

    @property
    def seen(self) -> list[tuple[object, ...]]:
        """Return the events of this thread."""
        return self._seen.setdefault(threading.get_ident(), [])

    def operation_begins(self, number: int, call: Call) -> None:
        self.seen.append(("begins", number, call.kind, call.name, call.nbytes))

    def operation_ends(self) -> None:
        self.seen.append(("ends",))

    def data_moves(self, nbytes: int) -> None:
        self.seen.append(("moves", nbytes))

    def waiting_for(self, instances: Sequence[int]) -> None:
        if 1 in instances:
            self.has_waited.set()

    def step_begins(self, step: int) -> None:
        self.seen.append(("step", step))

    def phase_begins(self, phase: str) -> None:
        self.seen.append(("phase", phase))

    def phase_ends(self, phase: str) -> None:
        self.seen.append(("end of", phase))


class Steps:
    """An instrument that records only steps."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def step_begins(self, step: int) -> None:
        self.steps.append(step)


class Released:
    """A supervisor."""

    def __init__(self) -> None:
        self.is_released = False
        self.lost = 0

    def carry_on(self, lost: int) -> None:
        self.lost = lost


OPERATIONS = {
    "all_reduce": ("all_reduce", 24, lambda each: each.all_reduce(np.ones((3, 2), np.float32), name="w")),
    "ordered_all_reduce": ("all_reduce", 56, lambda each: each.ordered_all_reduce([np.ones(7)] * 2, name="w")),
    "reduce_scatter": ("reduce_scatter", 48, lambda each: each.reduce_scatter(np.ones(6), name="w")),
    "ordered_reduce_scatter": (
        "reduce_scatter",
        12,
        lambda each: each.ordered_reduce_scatter([np.ones(6, np.int16)] * 2, name="w"),
    ),
    "broadcast": ("broadcast", 5, lambda each: each.broadcast(np.ones(5, bool), name="w")),
    "all_gather": ("all_gather", 7, lambda each: each.all_gather(np.ones(7, np.uint8), name="w")),
    "barrier": ("barrier", 0, lambda each: each.barrier(name="w")),
}


@MECHANISMS
@pytest.mark.parametrize(("kind", "nbytes", "call"), OPERATIONS.values(), ids=OPERATIONS)
def test_an_operation_begins_moves_data_and_ends(mechanism: str, kind: str, nbytes: int, call) -> None:
    eyes = Everything()

    def program(communicator: Communicator) -> list[tuple[object, ...]]:
        call(communicator)
        communicator.barrier()
        return list(eyes.seen)

    of_barrier = [("begins", 2, "barrier", "", 0), ("moves", 0), ("ends",)]
    expected = [("begins", 1, kind, "w", nbytes), ("moves", nbytes), ("ends",), *of_barrier]
    settings = Settings(mechanism=mechanism, progress=Instruments(eyes))
    assert run_on_threads(2, program, settings) == [expected] * 2


def test_a_group_is_one_operation_if_it_moves_together() -> None:
    group = (Call("ordered_all_reduce", "a", "sum", "float32", (3,)), Call("ordered_all_reduce", "b", "sum", "int8"))
    call = Call("grouped_ordered_all_reduce", "a, b", group=group)
    assert (call.kind, call.nbytes) == ("all_reduce", 13)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "bool", "int64"])
def test_bytes_are_counted_by_dtype(dtype: str) -> None:
    from ml_dtypes import bfloat16

    array = np.ones((5, 3), bfloat16 if dtype == "bfloat16" else dtype)
    eyes = Everything()
    with collectives.connect("single", Settings(progress=Instruments(eyes))) as communicator:
        communicator.broadcast(array)
    assert eyes.seen[0] == ("begins", 1, "broadcast", "", array.nbytes)


@MECHANISMS
def test_awaited_ranks_are_seen_and_data_move_after_they_arrive(mechanism: str) -> None:
    eyes = Everything()

    def program(communicator: Communicator) -> list[tuple[object, ...]]:
        if communicator.rank == 1:
            assert eyes.has_waited.wait(LIMIT_S)
            assert not any(what[0] == "moves" for of_thread in eyes._seen.values() for what in of_thread)
        communicator.all_reduce(np.ones(3))
        return list(eyes.seen)

    run_on_threads(2, program, Settings(mechanism=mechanism, progress=Instruments(eyes)))


def test_the_wait_for_a_named_operation_is_seen() -> None:
    eyes = Everything()

    def program(communicator: Communicator) -> list[tuple[object, ...]]:
        if communicator.rank == 1:
            assert eyes.has_waited.wait(LIMIT_S)
        communicator.start_all_reduce(np.ones(3), name="late").wait()
        return list(eyes.seen)

    first, _ = run_on_threads(2, program, Settings(progress=Instruments(eyes)))
    assert first == [("begins", 1, "all_reduce", "late", 24), ("ends",)]


def test_a_failed_operation_has_no_end() -> None:
    eyes = Everything()

    def program(communicator: Communicator) -> list[tuple[object, ...]]:
        with pytest.raises(LayoutMismatchError):
            communicator.all_reduce(np.ones(3 + communicator.rank))
        communicator.barrier()
        return list(eyes.seen)

    of_barrier = [("begins", 2, "barrier", "", 0), ("moves", 0), ("ends",)]
    found = run_on_threads(2, program, Settings(progress=Instruments(eyes)))
    assert found == [[("begins", 1, "all_reduce", "", 8 * (3 + rank)), *of_barrier] for rank in range(2)]


def test_the_closing_of_a_communicator_is_not_seen() -> None:
    """The last event of an instance is the last one of its program."""
    eyes = Everything()
    communicator = collectives.connect("single", Settings(progress=Instruments(eyes)))
    communicator.barrier()
    communicator.close()
    assert [what[0] for what in eyes.seen] == ["begins", "moves", "ends"]


# ---- phases


def test_a_phase_begins_and_ends() -> None:
    eyes = Everything()
    instruments = Instruments(eyes)
    instruments.step_begins(7)
    for _ in range(2):
        with instruments.during[EXCHANGE], instruments.during[EXCHANGE]:
            pass
    expected = [("phase", EXCHANGE)] * 2 + [("end of", EXCHANGE)] * 2
    assert eyes.seen == [("step", 7), *expected, *expected]


def test_a_failed_phase_has_no_end() -> None:
    eyes = Everything()
    with pytest.raises(ZeroDivisionError), Instruments(eyes).during[UPDATE]:
        raise ZeroDivisionError
    assert eyes.seen == [("phase", UPDATE)]


def test_each_wait_for_an_item_is_a_phase() -> None:
    eyes = Everything()

    def items() -> Iterator[str]:
        for item in "ab":
            eyes.seen.append(("makes", item))
            yield item

    assert list(Instruments(eyes).each(DATA, items())) == ["a", "b"]
    waits = [[("phase", DATA), ("makes", item), ("end of", DATA)] for item in "ab"]
    assert eyes.seen == [*waits[0], *waits[1], ("phase", DATA), ("end of", DATA)]


# ---- several instruments, some methods, and no instrument


def test_all_instruments_see_the_same_events_in_order() -> None:
    seen: list[tuple[str, int]] = []

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        def step_begins(self, step: int) -> None:
            seen.append((self.name, step))

    Instruments(Named("first"), Named("second"), Named("third")).step_begins(3)
    assert seen == [("first", 3), ("second", 3), ("third", 3)]


def test_an_instrument_sees_the_events_of_its_methods() -> None:
    steps, eyes = Steps(), Everything()
    instruments = Instruments(steps, eyes)
    with collectives.connect("single", Settings(progress=instruments)) as communicator:
        communicator.instruments.step_begins(2)
        communicator.barrier()
    assert steps.steps == [2]
    assert eyes.seen == [("step", 2), ("begins", 1, "barrier", "", 0), ("moves", 0), ("ends",)]


def test_without_an_instrument_no_event_is_passed_on() -> None:
    """Callers that ask first need not even call an empty function."""
    steps = Instruments(Steps())
    nobody = Instruments()
    for told in (nobody.operation_begins, nobody.operation_ends, nobody.data_moves, nobody.step_begins):
        assert not is_seen(told)
    assert is_seen(steps.step_begins)
    assert not is_seen(steps.operation_begins)
    for phase in PHASES:
        with nobody.during[phase]:
            pass


def test_an_exception_of_an_instrument_is_raised_to_the_caller() -> None:
    class Breaks:
        def data_moves(self, nbytes: int) -> None:
            raise ZeroDivisionError

    array = np.ones(3)
    with collectives.connect("single", Settings(progress=Instruments(Breaks()))) as communicator:
        with pytest.raises(ZeroDivisionError):
            communicator.broadcast(array)
        communicator.abandon()


def test_a_supervisor_knows_whether_to_wait_and_learns_of_losses() -> None:
    supervisor = Released()
    instruments = Instruments(supervisor=supervisor)
    assert not instruments.is_released
    supervisor.is_released = True
    assert instruments.is_released
    instruments.carry_on(2)
    assert supervisor.lost == 2


def test_without_a_supervisor_waits_are_never_released() -> None:
    instruments = Instruments(Steps())
    instruments.carry_on(2)
    assert not instruments.is_released
