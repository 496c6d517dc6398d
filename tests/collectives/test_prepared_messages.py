"""Reductions over gRPC that are repeated: one message to each worker and few functions, checked as before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import FrameType
from typing import TypeVar

import numpy as np
import pytest
from grpc_jobs import socket_addresses
from grpc_threads import LIMIT_S, WorkerThreads
from profiling import call_profiled
from test_prepared_reductions import functions_entered

from collectives import Communicator, LayoutMismatchError, UnsupportedBufferError
from collectives.kernel import Kernel

Result = TypeVar("Result")

LENGTHS = (7, 3001, 8001)  # three contributions of the longest travel as sums
CASES = [(length, contributions) for length in LENGTHS for contributions in (1, 2, 3)]

STEPS = {"ordered_all_reduce", "_take", "_run_taken", "_run", "carry_out", "_add", "reduce"}

Run = Callable[[Callable[[Communicator], Result]], list[Result]]


@pytest.fixture(params=[2, 3], scope="module")
def communicators(request: pytest.FixtureRequest) -> Iterator[list[Communicator]]:
    with socket_addresses(request.param) as addresses:
        workers: list[Future[Communicator]] = [WorkerThreads(addresses).join(rank) for rank in range(request.param)]
        found = [worker.result(LIMIT_S) for worker in workers]
        yield found
        with ThreadPoolExecutor(request.param) as pool:
            list(pool.map(Communicator.close, found, timeout=LIMIT_S))


@pytest.fixture
def run(communicators: list[Communicator]) -> Run[Result]:
    def on_all(program: Callable[[Communicator], Result]) -> list[Result]:
        with ThreadPoolExecutor(len(communicators)) as pool:
            return list(pool.map(program, communicators, timeout=LIMIT_S))

    return on_all


def arrays_of(rank: int, contributions: int, length: int, dtype: object = np.float32) -> list[np.ndarray]:
    random = np.random.default_rng(rank)
    return [(100 * random.standard_normal(length)).astype(dtype) for _ in range(contributions)]


def entered_apart_from_waits(call: Callable[[], object]) -> list[str]:
    """Return the names of the Python functions that a call enters on this thread, without those of a long wait."""
    entered: list[str] = []
    waiting: list[FrameType] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == "_await":
            waiting.append(frame)
        elif event == "call" and not waiting:
            entered.append(frame.f_code.co_name)
        elif event == "return" and frame in waiting:
            waiting.clear()

    call_profiled(call, note)
    return entered


def prepare(
    communicator: Communicator, arrays: Sequence[np.ndarray], out: np.ndarray, op: str = "mean"
) -> Callable[[], np.ndarray]:
    """Make a call twice; return a function that makes it again."""

    def reduce() -> np.ndarray:
        return communicator.ordered_all_reduce(arrays, out, op, name="gradients")

    reduce(), reduce()
    return reduce


@pytest.mark.parametrize(("length", "contributions"), CASES)
def test_the_third_call_enters_few_functions(
    native: Kernel, run: Run[list[str]], length: int, contributions: int
) -> None:
    def program(communicator: Communicator) -> list[str]:
        arrays = arrays_of(communicator.rank, contributions, length)
        reduce = prepare(communicator, arrays, np.empty(length, np.float32))
        return entered_apart_from_waits(reduce)

    found = run(program)
    for entered in found:
        assert set(entered) >= STEPS
        # for each message: two looks and a pause between them, and two functions that read it
        assert len(entered) <= 10 + 5 * len(found) + 5 * contributions, entered


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int8", "int32", "int64", "uint16"])
@pytest.mark.parametrize("op", ["sum", "mean", "max"])
@pytest.mark.parametrize("contributions", [1, 3])
def test_prepared_calls_have_the_bits_of_the_first(run: Run[bool], dtype: str, op: str, contributions: int) -> None:
    def program(communicator: Communicator) -> bool:
        is_equal = True
        for shape in ((301,), (7, 43), ()):
            arrays = [
                each.reshape(shape)
                for each in arrays_of(communicator.rank, contributions, np.prod(shape, dtype=int), dtype)
            ]
            out = np.empty(shape, dtype)
            first = communicator.ordered_all_reduce(arrays, None, op, name="gradients")
            reduce = prepare(communicator, arrays, out, op)
            out[...] = 0
            is_equal &= reduce().tobytes() == first.tobytes()
        return is_equal

    assert all(run(program))


@pytest.mark.parametrize(("length", "contributions"), CASES)
def test_other_calls_of_one_worker_leave_buffers_untouched(run: Run[bool], length: int, contributions: int) -> None:
    def program(communicator: Communicator) -> bool:
        arrays, out = arrays_of(communicator.rank, contributions, length), np.empty(length, np.float32)
        reduce = prepare(communicator, arrays, out)
        before = reduce().copy()
        out[...] = 5
        other = partial(communicator.barrier, name="other")
        with pytest.raises(LayoutMismatchError, match="gradients.*other"):
            (other if communicator.rank == 1 else reduce)()
        with pytest.raises(LayoutMismatchError, match="other"):
            communicator.ordered_all_reduce(arrays, out, name="gradients" if communicator.rank else "other")
        assert (out == 5).all()
        return reduce().tobytes() == before.tobytes()

    assert all(run(program))


@pytest.mark.parametrize("length", LENGTHS)
def test_numbers_of_contributions_may_change(run: Run[None], length: int) -> None:
    def program(communicator: Communicator) -> None:
        ones, out = [np.ones(length, np.float32)] * 3, np.empty(length, np.float32)
        size, rank = communicator.size, communicator.rank
        for own, others in [(1, 1), (1, 2), (2, 2), (3, 3), (1, 1)] * 3:
            count = own if rank == 0 else others
            communicator.ordered_all_reduce(ones[:count], out, name="x")
            assert (out == own + (size - 1) * others).all()

    run(program)


def test_one_worker_may_make_a_prepared_call_alone(run: Run[None]) -> None:
    def program(communicator: Communicator) -> None:
        array, out = np.ones(301, np.float32), np.empty(301, np.float32)
        for _ in range(6):
            into = out if communicator.rank == 0 else np.empty(301, np.float32)
            assert (communicator.ordered_all_reduce([array], into, name="x") == communicator.size).all()

    run(program)


def test_changed_arrays_are_refused(run: Run[None]) -> None:
    def program(communicator: Communicator) -> None:
        both = np.zeros(302, np.float32)
        arrays, out = [np.ones(301, np.float32) for _ in range(2)], both[:-1]
        reduce = prepare(communicator, arrays, out)
        for wrong in (both[1:], np.ones(301), np.ones((2, 301), np.float32)[0, ::-1], np.ma.masked_array(arrays[0])):
            right, arrays[1] = arrays[1], wrong
            with pytest.raises(UnsupportedBufferError):
                reduce()
            arrays[1] = right
        assert (reduce() == 1).all()
        out.setflags(write=False)
        with pytest.raises(UnsupportedBufferError):
            reduce()

    run(program)


def test_groups_are_prepared_and_their_overlaps_refused(run: Run[list[str]]) -> None:
    def program(communicator: Communicator) -> list[str]:
        arrays = [[np.full(301, number, np.float32)] for number in range(3)]
        outs = [np.empty(301, np.float32) for _ in range(3)]

        def reduce() -> None:
            communicator.grouped_ordered_all_reduce(arrays, outs, "mean", names=["a", "b", "c"])

        reduce(), reduce()
        entered = functions_entered(reduce)
        assert [out[-1] for out in outs] == [0, 1, 2]
        arrays[0] = [outs[1]]
        with pytest.raises(UnsupportedBufferError, match="tensors 'a' and 'b' of a group share memory"):
            reduce()
        return entered

    for entered in run(program):
        assert entered.count("carry_out") == 3
        assert "_run_and_learn" not in entered
