"""A timetable carried out for one replica: one thread per micro-batch, which waits for its turn at each stage.

The forward pass of a micro-batch reports each block that begins. Backward passes need not be cut into stages: autograd
numbers the nodes that it records, and goes back from the highest number to the lowest. The numbers at which a stage
began and ended show the first of its nodes that autograd reaches. A hook there waits for the stage's turn. Kernels and
bits are the same as without a pipeline, because micro-batches keep their order in each stage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain

import torch

from collectives.instruments import Instruments
from strategies.errors import StrategyError
from strategies.pipelines.running.driver import Course, Drive, ScheduledAction, raise_first
from strategies.pipelines.schedules import schedule_named
from strategies.pipelines.timetable import ActionKind, StageAction, Timed, Timetable, placed
from strategies.torch.pipelines.generators import drawing_in_thread
from strategies.torch.pipelines.graph import StageEntries, recorded
from strategies.torch.pipelines.stages import BufferUses, MetStages, TorchPipeline, watching

_sequence_number = torch._C._autograd._get_sequence_nr

Work = Callable[[int, "Walk"], None]
"""(number of a micro-batch, its walk) -> None. Called in a thread of the micro-batch."""


class PipelineRun:
    """The pipeline of a module, for one replica after another.

    The first call runs its micro-batches one after another, to learn the stages; later calls follow the timetable. If
    all stages are on one device, nothing can overlap, and no timetable is followed.

    Args:
        pipeline: The options of the pipeline.
        count: Number of micro-batches in a step.
        intra_op_threads: PyTorch's number of threads within an operation.
        module: The module.
        trains: Whether micro-batches have backward passes.
        instruments: The instruments to notify when a stage begins and ends with a micro-batch.
        is_at_once: Whether micro-batches may run at the same time. If layers wait for other replicas, they may not.

    Attributes:
        spans: The timed actions of all devices in the last step, by replica; empty after the first call.

    Raises:
        StrategyError: From `each`, see `Walk` and `MetStages`.
    """

    def __init__(
        self,
        pipeline: TorchPipeline,
        count: int,
        intra_op_threads: int,
        module: torch.nn.Module,
        trains: bool,
        instruments: Instruments,
        is_at_once: bool = True,
    ) -> None:
        self._pipeline, self._count, self._module = pipeline, count, module
        self._trains, self._is_at_once = trains, is_at_once
        self._instruments = instruments
        self._stages = MetStages(pipeline.placing())
        self._entries = StageEntries(self._stages)
        self._timetable: Timetable | None = None
        self._threads = ThreadPoolExecutor(count, "micro-batch", torch.set_num_threads, (intra_op_threads,))
        self.spans: dict[int, Sequence[Timed]] = {}

    def each(self, work: Work, replica: int) -> None:
        """Call a function for each micro-batch of a replica, in the order of the timetable.

        Raises:
            BaseException: The error that `work` has raised for a micro-batch. The other micro-batches have ended then.
        """
        if self._timetable is None or len(self._timetable.devices) == 1 or not self._is_at_once:
            self._one_by_one(work, replica)
        else:
            self._at_once(self._timetable, work, replica)

    def _one_by_one(self, work: Work, replica: int) -> None:
        for number in range(self._count):
            walk = Walk(self._stages, self._entries, number, None, self._instruments, replica)
            if number == 0 and self._timetable is None and self._trains:
                with BufferUses(self._module, walk) as uses:
                    walk.run(work)
                uses.refuse_changes_that_cross()
            else:
                walk.run(work)
        if self._timetable is None:
            self._timetable = self._planned()
            self._course = Course.of(self._timetable, lambda part: part[1].micro_batch)
            self._of_each: list[list[ScheduledAction]] = [[] for _ in range(self._count)]
            for turn in sorted(chain.from_iterable(self._course.devices), key=_place):
                if turn.action.micro_batch is not None:
                    self._of_each[turn.action.micro_batch].append(turn)

    def _at_once(self, timetable: Timetable, work: Work, replica: int) -> None:
        drive = Drive(self._course, time.perf_counter())
        walks = [
            Walk(self._stages, self._entries, number, Turns(drive, turns, timetable), self._instruments, replica)
            for number, turns in enumerate(self._of_each)
        ]
        # the first micro-batch comes last: the others sleep by then, and do not contend for Python's lock
        raise_first([self._threads.submit(walk.run, work) for walk in reversed(walks)])
        spans = list(drive.spans)
        if self._trains:
            end_s = max(span.end_s for span in spans)
            spans += [
                Timed(device, StageAction(ActionKind.UPDATE, stage, None), end_s, end_s)
                for stage, devices in enumerate(timetable.mapping)
                for device in devices
            ]
        self.spans[replica] = spans

    def _planned(self) -> Timetable:
        """Return the timetable of the stages that the first step has met."""
        devices = self._stages.devices()
        if self._trains:
            self._stages.refuse_unmet()
        if self._pipeline.needs_full and len(devices) > self._count:
            what, count = ("step", "a gradient accumulation") if self._trains else ("call", "deviceIterations")
            raise StrategyError(
                f"the pipeline has {len(devices)} stages, but a {what} has {self._count} micro-batches, which cannot "
                f"fill it; use {count} of {len(devices)} or more, or poptorch.ShardedExecution"
            )
        numbers = {device: number for number, device in enumerate(sorted(set(devices)))}
        schedule = schedule_named(self._pipeline.schedule)
        return schedule.timetable(placed([numbers[device] for device in devices]), self._count, self._trains)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=True)


def _place(turn: ScheduledAction) -> tuple[int, int]:
    """Return a key that sorts the actions of a micro-batch in the order of its thread: forward, then back."""
    kind, stage = turn.action.kind, turn.action.stage
    return (0, stage) if kind is ActionKind.FORWARD else (1, -stage)


class Turns:
    """The turns of one micro-batch: its thread calls `wait` before each action, and `done` after it.

    Args:
        drive: The drive of all micro-batches.
        turns: The actions of this one, in their order.
        timetable: The timetable.
    """

    def __init__(self, drive: Drive, turns: Sequence[ScheduledAction], timetable: Timetable) -> None:
        self.timetable = timetable
        self.drive = drive
        self._turns = turns
        self._next = 0
        self._begun_s = 0.0

    def wait(self, kind: ActionKind, stage: int) -> None:
        """Wait for the turn of the next action. `kind` and `stage` say what the thread is about to do.

        Raises:
            AbandonedError: If another micro-batch has failed.
        """
        turn = self._turns[self._next]
        assert (turn.action.kind, turn.action.stage) == (kind, stage), f"{kind} of stage {stage}, not {turn.action}"
        self.drive.wait(turn)
        self._begun_s = self.drive.clock()

    def done(self) -> None:
        """Mark the action as ended, and wake threads that wait for it."""
        turn = self._turns[self._next]
        self._next += 1
        following = self._turns[self._next] if self._next < len(self._turns) else None
        self.drive.done(turn, self._begun_s, following)


class Walk:
    """The way of a micro-batch through the stages, forward and back. Its thread reports the blocks.

    Args:
        stages: The stages met so far.
        entries: The entries of the stages in backward passes.
        micro_batch: The number of the micro-batch.
        turns: The turns of the micro-batch; None to run micro-batches one after another.
        instruments: The instruments to notify.
        replica: The global index of the replica.
    """

    def __init__(
        self,
        stages: MetStages,
        entries: StageEntries,
        micro_batch: int,
        turns: Turns | None,
        instruments: Instruments,
        replica: int,
    ) -> None:
        self._stages, self._entries = stages, entries
        self._micro_batch = micro_batch
        self._turns = turns
        self._instruments, self._replica = instruments, replica
        self._kind = ActionKind.FORWARD
        self.stage = 0
        self._begins = [0]  # autograd's sequence numbers at which the stages begin
        self._around: list[int] = []  # the stages of the enclosing blocks

    @property
    def is_at_once(self) -> bool:
        """Whether other micro-batches run at the same time."""
        return self._turns is not None

    def drawing(self, seed: int) -> AbstractContextManager[None]:
        """Return a context in which this thread draws the random numbers of the micro-batch."""
        return drawing_in_thread(seed) if self.is_at_once else nullcontext()

    def run(self, work: Work) -> None:
        """Go through the stages. If it fails, no other micro-batch waits for this one."""
        with watching(self):
            try:
                self._begins = [_sequence_number()]
                self._wait()
                work(self._micro_batch, self)
            except BaseException:
                if self._turns is not None:
                    self._turns.drive.give_up()
                raise

    def begin(self, name: str, ipu: int | None) -> None:
        """Enter a block. If a new stage begins with it, wait for the turn of that stage.

        Raises:
            StrategyError: If the block belongs to an earlier stage, or to one that the first step did not have.
        """
        self._around.append(self.stage)
        self._advance(self._stages.of(name, ipu), name)

    def end(self) -> None:
        """Leave a block. Code between this block and the next one still belongs to this stage."""
        self._around.pop()

    def _advance(self, stage: int, name: str) -> None:
        if stage < self.stage:
            raise StrategyError(
                f"block {name!r} of stage {stage} begins after stage {self.stage}; the order of stages must follow the "
                "data flow: number them so, or put both blocks into one stage"
            )
        if self._turns is not None and stage >= self._turns.timetable.num_stages:
            raise StrategyError(
                f"block {name!r} of stage {stage} was missing in the first step, from which the pipeline was planned; "
                "enter the same blocks in every step"
            )
        while self.stage < stage:
            self._done()
            self.stage += 1
            self._begins.append(_sequence_number())
            self._wait()

    def turn_round(self, loss: torch.Tensor, last: int) -> None:
        """End the forward pass with a loss, and wait for the turn of its backward pass."""
        self._advance(last, "the loss")
        if last:
            graph = recorded(loss, self._begins)
            for stage, number in self._entries.of(graph).items():
                if stage != last:
                    graph.nodes[number].register_prehook(partial(self._go_back, stage))
        self._done()
        self._kind = ActionKind.BACKWARD
        self._wait()

    def back(self, loss: torch.Tensor) -> None:
        """Run the backward pass from the loss that `turn_round` was given."""
        loss.backward()
        self._go_back(0)
        self._done()

    def leave(self) -> None:
        """End a forward pass that has no backward pass."""
        self._advance(self.last_stage, "the end")
        self._done()

    @property
    def last_stage(self) -> int:
        """The number of the last stage met so far by any micro-batch."""
        return max(self.stage, len(self._stages.devices()) - 1)

    def _go_back(self, stage: int, _: object = None) -> None:
        """End the backward passes of the later stages, and wait for the turn of `stage`. Called by autograd."""
        while self.stage > stage:
            self._done()
            self.stage -= 1
            self._wait()

    def _wait(self) -> None:
        if self._turns is not None:
            self._turns.wait(self._kind, self.stage)
        self._instruments.replica_begins(self._replica, self.stage)

    def _done(self) -> None:
        self._instruments.replica_ends(self._replica, self.stage, self._micro_batch)
        if self._turns is not None:
            self._turns.done()
