"""Reductions of one layout that are repeated: prepared for the native kernel, and checked as before."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from profiling import call_profiled

from collectives import Communicator, Settings, UnsupportedBufferError, run_on_threads
from collectives.calls import Call
from collectives.errors import BusyError
from collectives.instruments import Instruments
from collectives.kernel import Kernel
from collectives.shared_memory import segment

WINDOW = Settings(mechanism="window")
LENGTHS = (7, 3001, 70_001)


def functions_entered(call: Callable[[], object]) -> list[str]:
    """Return the names of the project's functions that a call enters on this thread, in order."""
    entered = []

    def note(frame, event, _):
        if (
            event == "call"
            and "/collectives/" in frame.f_code.co_filename
            and "/tests/" not in frame.f_code.co_filename
        ):
            entered.append(frame.f_code.co_name)

    call_profiled(call, note)
    return entered


def test_the_numbers_of_the_kernel_are_those_of_the_window(native: Kernel) -> None:
    names = ("SEQUENCE", "FINGERPRINT", "COUNT", "NBYTES", "PRODUCED", "CONSUMED", "REDUCED", "FETCHED")
    for name in (*names, "WAKES", "WORDS", "DEPTH"):
        assert getattr(native, name) == getattr(segment, name), name


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("is_allocated", [True, False])
def test_the_third_call_runs_in_the_kernel(native: Kernel, length: int, is_allocated: bool) -> None:
    def program(communicator: Communicator) -> list[str]:
        arrays = [np.ones(length, np.float32)]
        out = communicator.allocate((length,), np.float32) if is_allocated else np.empty(length, np.float32)
        for _ in range(2):
            communicator.ordered_all_reduce(arrays, out, "mean", name="gradients")
        return functions_entered(lambda: communicator.ordered_all_reduce(arrays, out, "mean", name="gradients"))

    prepared = ["ordered_all_reduce", "key", "place_of", "_run_taken", "_run", "carry_out", "begin_exchange"]
    for entered in run_on_threads(2, program, WINDOW):
        # A rank that has to wait for longer than a millisecond goes on in `wait_on`.
        assert entered[: len(prepared)] == prepared
        assert "_run_and_learn" not in entered


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("is_in_place", [True, False])
def test_new_private_arrays_of_a_known_layout_run_in_the_kernel(native: Kernel, length: int, is_in_place: bool) -> None:
    def program(communicator: Communicator) -> list[str]:
        def reduce(value: float) -> np.ndarray:
            arrays = [np.full(length, value + number, np.float32) for number in range(2)]
            out = arrays[0] if is_in_place else np.empty(length, np.float32)
            kept.append(communicator.grouped_ordered_all_reduce([arrays], [out], "sum", names=["gradients"])[0])
            return kept[-1]

        kept: list[np.ndarray] = []  # so that no array has the place of an earlier one
        for value in range(2):
            reduce(value)
        entered = functions_entered(lambda: reduce(communicator.rank))
        assert (kept[-1] == 4).all()
        return entered

    for entered in run_on_threads(2, program, WINDOW):
        assert "carry_out" in entered
        assert "_run_and_learn" not in entered


def test_a_reduction_into_new_shared_memory_is_prepared_for_itself() -> None:
    def program(communicator: Communicator) -> None:
        for value in range(4):  # a freed array may leave its `id` to the next one
            out = communicator.allocate((70_001,), np.float32)
            for _ in range(4):
                communicator.ordered_all_reduce([np.full(70_001, value, np.float32)], out)
                assert (out == 2 * value).all()
                communicator.barrier()
            private = np.empty(70_001, np.float32)
            communicator.ordered_all_reduce([np.full(70_001, 5, np.float32)], private)
            assert (private == 10).all()
            assert (out == 2 * value).all()
            del out

    run_on_threads(2, program, WINDOW)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_group_runs_in_the_kernel_and_its_overlaps_are_still_refused(native: Kernel, length: int) -> None:
    def program(communicator: Communicator) -> list[str]:
        arrays = [[np.full(length, number, np.float32)] for number in range(3)]
        outs = [communicator.allocate((length,), np.float32) for _ in range(3)]

        def reduce() -> None:
            communicator.grouped_ordered_all_reduce(arrays, outs, names=["a", "b", "c"])

        for _ in range(3):
            reduce()
        entered = functions_entered(reduce)
        assert [out[-1] for out in outs] == [0, 2, 4]
        arrays[0] = [outs[1]]
        with pytest.raises(UnsupportedBufferError, match="tensors 'a' and 'b' of a group share memory"):
            reduce()
        with pytest.raises(ValueError, match="a group has 2 lists"):
            communicator.grouped_ordered_all_reduce(arrays[1:], outs, names=["a", "b", "c"])
        arrays[0] = [np.full(length, 5, np.float32)]
        reduce()
        assert outs[0][-1] == 10
        return entered

    for entered in run_on_threads(2, program, WINDOW):
        assert entered.count("carry_out") == 3
        assert "_run_and_learn" not in entered


def refused(communicator: Communicator, out: np.ndarray, arrays: list[np.ndarray], spoil: Callable[[], object]) -> None:
    """Prepare a reduction, spoil it, and see that it is refused before it reaches the other ranks."""
    for _ in range(3):
        communicator.ordered_all_reduce(arrays, out)
    spoil()
    with pytest.raises(UnsupportedBufferError):
        communicator.ordered_all_reduce(arrays, out)


@pytest.mark.parametrize("length", LENGTHS)
def test_changed_arrays_of_a_prepared_call_are_refused(length: int) -> None:
    def program(communicator: Communicator) -> None:
        def new() -> tuple[np.ndarray, list[np.ndarray]]:
            return np.zeros(length, np.float32), [np.ones(length, np.float32) for _ in range(2)]

        out, arrays = new()
        refused(communicator, out, arrays, lambda: out.setflags(write=False))
        out, arrays = new()
        refused(communicator, out, arrays, lambda: arrays.__setitem__(1, np.ones(length, np.float64)))
        out, arrays = new()
        refused(communicator, out, arrays, lambda: arrays.__setitem__(0, np.ones((2, length), np.float32)[0, ::-1]))
        out, arrays = new()
        refused(communicator, out, arrays, lambda: arrays.__setitem__(0, np.ma.masked_array(arrays[0])))
        both, (_, arrays) = np.zeros(length + 1, np.float32), new()
        refused(communicator, both[:-1], arrays, lambda: arrays.__setitem__(0, both[1:]))
        out, arrays = new()
        assert (communicator.ordered_all_reduce(arrays, out) == 6).all()

    run_on_threads(3, program, WINDOW)


def test_an_array_at_the_place_of_a_freed_one_is_checked_again() -> None:
    """A view of allocated memory may get the `id` of a private array that was reduced into before."""

    def program(communicator: Communicator) -> int:
        allocated = communicator.allocate((70_001,), np.float32)
        array = np.ones(70_001, np.float32)
        found = 0
        for _ in range(100):
            out = np.empty(70_001, np.float32)
            for _ in range(2):
                communicator.ordered_all_reduce([array], out)
            before = id(out)
            del out
            view = allocated[:]
            found += id(view) == before
            with pytest.raises(UnsupportedBufferError, match="give ordered_all_reduce the whole array"):
                communicator.ordered_all_reduce([array], view)
            del view
        return found

    assert sum(run_on_threads(2, program, WINDOW)) > 0


@pytest.mark.usefixtures("with_either")
def test_spreads_may_change_between_reductions() -> None:
    def program(communicator: Communicator) -> None:
        out = communicator.allocate((70_001,), np.float32)
        for counts in [(1, 1), (1, 2), (1, 1)] * 3:
            communicator.ordered_all_reduce([np.ones(70_001, np.float32)] * counts[communicator.rank], out, "mean")
            assert (out == 1).all(), counts
            communicator.barrier()

    run_on_threads(2, program, WINDOW)


def test_no_array_is_kept_alive_by_a_prepared_call() -> None:
    def program(communicator: Communicator) -> list[object]:
        array, out = np.ones(3001, np.float32), np.empty(3001, np.float32)
        for _ in range(4):
            communicator.ordered_all_reduce([array], out)
        references = [weakref.ref(array), weakref.ref(out)]
        del array, out
        return [reference() for reference in references]

    assert run_on_threads(2, program, WINDOW) == [[None, None]] * 2


class Observer:
    """An instrument that notes the events of each thread, i.e. of each rank."""

    def __init__(self) -> None:
        self._notes: dict[int, list[object]] = {}

    @property
    def notes(self) -> list[object]:
        return self._notes.setdefault(threading.get_ident(), [])

    def operation_begins(self, number: int, call: Call) -> None:
        self.notes.append((number, call.title))

    def data_moves(self, nbytes: int) -> None:
        self.notes.append(nbytes)

    def operation_ends(self) -> None:
        self.notes.append("ends")


@pytest.mark.parametrize("length", LENGTHS)
def test_instruments_see_a_prepared_call(length: int) -> None:
    observer = Observer()

    def program(communicator: Communicator) -> None:
        for out in (communicator.allocate((length,), np.float32), np.empty(length, np.float32)):
            for _ in range(4):
                communicator.ordered_all_reduce([np.ones(length, np.float32)], out, name="x")
                number = communicator.calls_made
                assert observer.notes[-3:] == [(number, "ordered_all_reduce 'x'"), 4 * length, "ends"]

    run_on_threads(2, program, Settings(mechanism="window", progress=Instruments(observer)))


def test_an_error_of_an_instrument_ends_a_prepared_call() -> None:
    class Breaks:
        def __init__(self) -> None:
            self.left = 7

        def data_moves(self, nbytes: int) -> None:
            self.left -= 1
            if not self.left:
                raise ZeroDivisionError("the instrument breaks")

    def program(communicator: Communicator) -> None:
        array, out = np.ones(3001, np.float32), np.empty(3001, np.float32)
        for _ in range(9):
            communicator.ordered_all_reduce([array], out)

    with pytest.raises(ZeroDivisionError):
        run_on_threads(2, program, Settings(mechanism="window", progress=Instruments(Breaks())))


def test_a_prepared_call_from_a_second_thread_is_refused_while_one_runs() -> None:
    came, waits = threading.Event(), threading.Event()

    def program(communicator: Communicator) -> None:
        array, out = np.ones(3001, np.float32), np.empty(3001, np.float32)
        for _ in range(3):
            communicator.ordered_all_reduce([array], out)
        if communicator.rank == 1:
            assert came.wait(60)
            communicator.ordered_all_reduce([array], out)
            return
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(communicator.ordered_all_reduce, [array], out)
            assert waits.wait(60)
            for _ in range(2):
                with pytest.raises(BusyError):
                    communicator.ordered_all_reduce([array], out)
            came.set()
            assert (other.result(60) == 2).all()

    class Waits:
        def waiting_for(self, instances: Sequence[int]) -> None:
            if 1 in instances:
                waits.set()

    run_on_threads(2, program, Settings(mechanism="window", progress=Instruments(Waits())))


def test_single_values_are_prepared(native: Kernel) -> None:
    def program(communicator: Communicator) -> int:
        out = np.empty((), np.float32)
        for number in range(4):
            communicator.ordered_all_reduce([np.array(number, np.float32)], out)
            assert out == 2 * number
        return len(communicator._prepared.calls)

    assert run_on_threads(2, program, WINDOW) == [1, 1]
