"""A timetable carried out for one replica: one thread per micro-batch, which waits for its turn at each stage.

The forward pass of a micro-batch reports each block that begins. Backward passes need not be cut into stages: autograd
numbers the nodes that it records, and goes back from the highest number to the lowest. The numbers at which a stage
began and ended show the first of its nodes that autograd reaches. A hook there waits for the stage's turn. Kernels and
bits are the same as without a pipeline, because micro-batches keep their order in each stage.
If a schedule splits backward passes, the thread goes through the stages a third time, for the gradients of parameters
(`strategies.torch.split_backward`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from collectives.instruments import Instruments
from strategies.errors import StrategyError
from strategies.pipelines.running.driver import raise_first
from strategies.pipelines.schedules import schedule_named
from strategies.pipelines.timetable import ActionKind, Timed, Timetable, placed
from strategies.torch.micro_batches import MicroBatchCourse, MicroBatches, MicroBatchTurns, weights_behind
from strategies.torch.recorded_graph import recorded
from strategies.torch.split_backward import SplitBackward
from strategies.torch.stage_entries import KnownEntries
from strategies.torch.stages import BufferUses, MetStages, TorchPipeline, watching

_sequence_number = torch._C._autograd._get_sequence_nr


class PipelineRun:
    """One replica's pipeline, step after step.

    The first step runs its micro-batches one after another, to learn the stages; later steps follow the timetable. If
    all stages are on one device, nothing can overlap, and no timetable is followed.

    Args:
        pipeline: The options of the pipeline.
        count: Number of micro-batches in a step.
        intra_op_threads: PyTorch's number of threads within an operation.
        module: The replica's module.
        training: Whether micro-batches have backward passes.
        instruments: The instruments to notify when a stage begins and ends with a micro-batch.
        replica: The global index of the replica, for the instruments.
        meets: Whether layers wait for other replicas.

    Attributes:
        spans: The timed actions of all devices in the last step; empty after the first one.

    Raises:
        StrategyError: From `each`, see `Walk` and `MetStages`.
    """

    def __init__(
        self,
        pipeline: TorchPipeline,
        count: int,
        intra_op_threads: int,
        module: torch.nn.Module,
        training: bool = True,
        instruments: Instruments | None = None,
        replica: int = 0,
        meets: bool = False,
    ) -> None:
        self._pipeline = pipeline
        self._meets = meets
        self._count = count
        self._stages = MetStages(pipeline.placing())
        self._entries = KnownEntries(self._stages)
        self._timetable: Timetable | None = None
        self._trains = training
        self._instruments, self._replica = instruments or Instruments(), replica
        self._module = module
        self._threads = ThreadPoolExecutor(count, "micro-batch", torch.set_num_threads, (intra_op_threads,))
        self.spans: Sequence[Timed] = ()
        for name, inner in module.named_modules():
            if inner._buffers and training:
                inner.register_forward_pre_hook(partial(self._stages.enter_module, name))

    def each(self, work: Callable[[int, Walk], None]) -> None:
        """Call a function for each micro-batch, in the order of the timetable.

        Args:
            work: Called with the number of a micro-batch and its `Walk`, in a thread of its own.

        Raises:
            BaseException: The error that `work` has raised for a micro-batch. The other micro-batches have ended then.
        """
        if self._timetable is None or len(self._timetable.devices) == 1:
            for number in range(self._count):
                walk = self._walk(number, None)
                if number == 0 and self._timetable is None and self._trains:
                    self._look(walk, work)
                else:
                    _walk(walk, work)
            if self._timetable is None:
                self._timetable = self._planned()
                self._course = MicroBatchCourse(self._timetable)
            return
        drive = MicroBatches(self._course, self._meets)
        walks = [self._walk(number, drive.turns_of(number)) for number in range(self._count)]
        # the first micro-batch comes last: the others sleep by then, and do not contend for Python's lock
        raise_first([self._threads.submit(_walk, walk, work) for walk in reversed(walks)])
        self.spans = drive.spans

    def _walk(self, number: int, turns: MicroBatchTurns | None) -> Walk:
        return Walk(self._stages, self._entries, number, turns, self._instruments, self._replica)

    def _look(self, walk: Walk, work: Callable[[int, Walk], None]) -> None:
        with BufferUses(self._module, lambda: walk.stage) as uses:
            _walk(walk, work)
        uses.refuse_changes_that_cross()

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
        timetable = schedule.timetable(placed([numbers[device] for device in devices]), self._count, self._trains)
        has_several = len(timetable.devices) < timetable.num_stages
        return weights_behind(timetable) if timetable.has_split_backward and has_several else timetable

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=True)


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
        entries: KnownEntries,
        micro_batch: int,
        turns: MicroBatchTurns | None,
        instruments: Instruments,
        replica: int,
    ) -> None:
        self._stages, self._entries = stages, entries
        self._micro_batch = micro_batch
        self._turns = turns
        self._instruments, self._replica = instruments, replica
        self._kind = ActionKind.FORWARD
        self.stage = 0
        self._split: SplitBackward | None = None
        self._begins = [0]  # autograd's sequence numbers at which the stages begin
        self._around: list[int] = []  # the stages of the enclosing blocks

    def start(self) -> None:
        """Enter the first stage."""
        self._begins = [_sequence_number()]
        self._wait()

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
        splits = self._turns is not None and self._turns.timetable.has_split_backward
        if last or splits:
            graph = recorded(loss, self._begins)
            entries = self._entries.of(graph, splits)
            if entries.split is not None:
                self._split = SplitBackward(loss, graph, entries.split)
            for stage, number in entries.firsts.items():
                if stage != last:
                    graph.nodes[number].register_prehook(partial(self._go_back, stage))
        self._done()
        self._kind = ActionKind.BACKWARD_INPUTS if splits else ActionKind.BACKWARD
        self._wait()

    def back(self, loss: torch.Tensor) -> None:
        """Run the backward pass from the loss that `turn_round` was given."""
        if self._split is None:
            loss.backward()
        else:
            self._split.of_inputs()
        self._go_back(0)
        self._done()
        if self._split is not None:
            split, self._split = self._split, None  # hooks of nodes lead here; without a cycle, memory is freed at once
            self._go_through_weights(split, self._turns)

    def _go_through_weights(self, split: SplitBackward, turns: MicroBatchTurns | None) -> None:
        assert turns is not None
        self._kind = ActionKind.BACKWARD_WEIGHTS
        for self.stage in range(turns.timetable.num_stages):
            self._wait()
            split.of_weights(self.stage)
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

    def give_up(self) -> None:
        """End the waits of all micro-batches."""
        if self._turns is not None:
            self._turns.give_up()


def _walk(walk: Walk, work: Callable[[int, Walk], None]) -> None:
    with watching(walk):
        try:
            walk.start()
            work(walk._micro_batch, walk)
        except BaseException:
            walk.give_up()
            raise
