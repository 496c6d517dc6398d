"""Pipelines of PyTorch modules: their stages, and a timetable carried out with one thread per micro-batch.

The forward pass of a micro-batch reports each block that begins. Backward passes need not be cut into stages: autograd
numbers the nodes that it records, and goes back from the highest number to the lowest. The numbers at which a stage
began and ended show the first of its nodes that autograd reaches. A hook there waits for the stage's turn. Kernels and
bits are the same as without a pipeline, because micro-batches keep their order in each stage.
"""

from __future__ import annotations

import sys
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Protocol

import torch
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

import strategies.trees as trees
from collectives.instruments import Instruments
from strategies.errors import StrategyError
from strategies.pipelines.running.driver import ScheduledAction, ScheduleGraph, ScheduleRunner, raise_first
from strategies.pipelines.timetable import (
    ActionKind,
    PipelineSchedule,
    Timed,
    Timetable,
    placed,
    schedule_named,
)
from strategies.torch.replicas.generators import drawing_in_thread, seed_generators
from strategies.torch.replicas.module_parts import Slot, slots_of
from strategies.torch.tensors import ThreadValue

# ---- stages


class StagePlacing(Protocol):
    """The assignment of blocks to stages. Forward passes ask for each block; the first pass may extend it."""

    def of(self, name: str, ipu: int | None) -> tuple[int, int]:
        """Return the number and the device of a block's stage. Called under a lock, for each block that begins.

        Args:
            name: The name of the block.
            ipu: The device that the block asks for; None if it asks for none.

        Raises:
            StrategyError: If the block has no stage.
        """

    def unmet(self) -> list[str]:
        """Return the names of expected blocks that were not met. Called after the first pass."""


@dataclass(frozen=True)
class TorchPipeline:
    """Options of a pipeline whose stages run on simulated devices.

    Attributes:
        placing: Makes the assignment of blocks to stages, for one replica.
        schedule: The order in which stages work on micro-batches.
        needs_full: Whether a step needs at least as many micro-batches as stages.
    """

    placing: Callable[[], StagePlacing]
    schedule: PipelineSchedule | str = PipelineSchedule.OneForwardOneBackward
    needs_full: bool = True


_cursor = ThreadValue["StageCursor | None"](None)
"""The stage of the micro-batch that this thread computes."""


def number_from_zero() -> None:
    """Restart the numbering of blocks without a name at 0."""
    if (cursor := _cursor.now) is not None:
        cursor.unnamed = 0


def begin_block(name: str | None, ipu: int | None) -> None:
    """Report a block that begins. Without a name it is named by its number among such blocks."""
    if (cursor := _cursor.now) is not None:
        cursor.begin(name, ipu)


class DiscoveredStages:
    """The stages of a module that the micro-batches of a replica have met. Threads may share it."""

    def __init__(self, placing: StagePlacing) -> None:
        self._placing = placing
        self._devices: dict[int, int] = {}  # by stage
        self._of_parameters: MutableMapping[torch.Tensor, int] = WeakIdKeyDictionary()  # the devices that use them
        self._lock = threading.Lock()

    def of(self, name: str, ipu: int | None) -> int:
        """Return the stage of a block."""
        with self._lock:
            stage, device = self._placing.of(name, ipu)
            self._devices.setdefault(stage, device)
        return stage

    def check_all_blocks_met(self) -> None:
        """Raise if a stage has a block that no micro-batch has entered."""
        if unmet := self._placing.unmet():
            raise StrategyError(
                f"a stage has the block {unmet[0]!r}, which no micro-batch of the first step has entered; mark it in "
                f"the model with poptorch.Block({unmet[0]!r}), or leave it out of the strategy"
            )

    def devices(self) -> list[int]:
        """Return the device of each stage. A stage that was not met gets the device of the stage before it."""
        found: list[int] = []
        for stage in range(1 + max(self._devices, default=0)):
            found.append(self._devices.get(stage, found[-1] if found else 0))
        return found

    def use(self, parameter: torch.Tensor, stage: int) -> None:
        """Record that a stage uses a parameter.

        Raises:
            StrategyError: If a stage on another device uses it too.
        """
        device = self._devices.get(stage, stage)
        other = self._of_parameters.setdefault(parameter, device)
        if other != device:
            raise StrategyError(
                f"a parameter of shape {[*parameter.shape]} is used on the devices {other} and {device}; use it on one"
            )


class BufferUses(TorchFunctionMode):
    """A watcher of the buffers passed to PyTorch's operators, in the thread that enters it.

    If several stages use a buffer that changes, it is refused: micro-batches would change it out of order.

    Args:
        module: The module with the buffers.
        cursor: The present stage of the micro-batch.
    """

    def __init__(self, module: torch.nn.Module, cursor: StageCursor) -> None:
        super().__init__()
        self._slots = slots_of(module)
        self._cursor = cursor
        self._stages: dict[str, set[int]] = {slot.name: set() for slot in self._slots}
        self._before = [_identity(slot) for slot in self._slots]

    @override
    def __torch_function__(
        self,
        function: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        given = {id(leaf) for leaf in trees.leaves((args, kwargs))}
        for slot in self._slots:
            if id(slot.tensor) in given:
                self._stages[slot.name].add(self._cursor.stage)
        return function(*args, **(kwargs or {}))

    def check_buffers_in_one_stage(self) -> None:
        """Raise if a buffer has changed that several stages use."""
        for slot, before in zip(self._slots, self._before, strict=True):
            stages = sorted(self._stages[slot.name])
            if len(stages) > 1 and _identity(slot) != before:
                raise StrategyError(
                    f"buffer {slot.name} changes, and is used in the stages {', '.join(map(str, stages))}, whose "
                    "micro-batches would change it out of order; use it in the blocks of one stage"
                )


def _identity(slot: Slot) -> tuple[int, int]:
    """Return a value that differs once a buffer has been changed."""
    return id(slot.tensor), slot.tensor._version


# ---- micro-batches


def entries_of(loss: torch.Tensor, begins: Sequence[int], stages: DiscoveredStages) -> dict[int, Node]:
    """Return the first node that the backward pass of a loss reaches in each stage: the one that was recorded last.

    Args:
        loss: The loss.
        begins: Autograd's sequence numbers at which the stages begin.
        stages: The stages, to record the parameters that they use.

    Raises:
        StrategyError: If the loss is a parameter, which no node has computed, or stages share a parameter that they
            cannot share.
    """
    if loss.grad_fn is None:
        raise StrategyError(
            f"the loss is a parameter of shape {list(loss.shape)}, but a pipeline's stages must compute it; return a "
            "value computed from the parameter, as 1 * loss"
        )
    nodes, known = [loss.grad_fn], {loss.grad_fn}
    last: dict[int, tuple[int, Node]] = {}
    for node in nodes:  # grows on the way
        recorded_at = node._sequence_nr()
        stage = bisect_right(begins, recorded_at) - 1  # -1 before the first one
        if stage >= 0 and recorded_at > last.get(stage, (-1, node))[0]:
            last[stage] = recorded_at, node
        for following, _ in node.next_functions:
            if (parameter := getattr(following, "variable", None)) is not None:
                stages.use(parameter, max(stage, 0))
            elif following is not None and following not in known:
                known.add(following)
                nodes.append(following)
    return {stage: node for stage, (_, node) in last.items()}


_sequence_number = torch._C._autograd._get_sequence_nr

Work = Callable[[int, "StageCursor"], None]
"""(number of a micro-batch, its cursor) -> None. Called in a thread of the micro-batch."""


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
        stages: The stages met so far.
        instruments: The instruments.
        spans: The timed actions of all devices in the last step, by replica; empty after the first call.

    Raises:
        StrategyError: From `each`, see `StageCursor` and `DiscoveredStages`.
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
        self.instruments = instruments
        self.stages = DiscoveredStages(pipeline.placing())
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
            self._at_once(work, replica)

    def _one_by_one(self, work: Work, replica: int) -> None:
        for number in range(self._count):
            cursor = StageCursor(self, number, replica)
            if number == 0 and self._timetable is None and self._trains:
                with BufferUses(self._module, cursor) as uses:
                    cursor.run(work)
                uses.check_buffers_in_one_stage()
            else:
                cursor.run(work)
        if self._timetable is None:
            self._timetable = self._planned()
            self._schedule_graph = ScheduleGraph.of(self._timetable, lambda part: part[1].micro_batch)
            every = sorted(chain.from_iterable(self._schedule_graph.devices), key=_place)
            self._of_each = [[one for one in every if one.action.micro_batch == n] for n in range(self._count)]
            self._updates = [one for one in every if one.action.kind is ActionKind.UPDATE]

    def _at_once(self, work: Work, replica: int) -> None:
        runner = ScheduleRunner(self._schedule_graph, time.perf_counter())
        cursors = [StageCursor(self, number, replica, runner, actions) for number, actions in enumerate(self._of_each)]
        # the first micro-batch comes last: the others sleep by then, and do not contend for Python's lock
        raise_first([self._threads.submit(cursor.run, work) for cursor in reversed(cursors)])
        end_s = max(span.end_s for span in runner.spans)
        updates = [Timed(one.device, one.action, end_s, end_s) for one in self._updates]
        self.spans[replica] = [*runner.spans, *updates]

    def _planned(self) -> Timetable:
        """Return the timetable of the stages that the first step has met."""
        devices = self.stages.devices()
        if self._trains:
            self.stages.check_all_blocks_met()
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


def _place(scheduled: ScheduledAction) -> tuple[int, int]:
    """Return a key that sorts the actions of a micro-batch in the order of its thread: forward, then back."""
    kind, stage = scheduled.action.kind, scheduled.action.stage
    return (0, stage) if kind is ActionKind.FORWARD else (1, -stage)


class StageCursor:
    """The stage of a micro-batch, forward and back. Its thread reports the blocks that it enters.

    Args:
        pipeline: The pipeline of the module.
        micro_batch: The number of the micro-batch.
        replica: The global index of the replica.
        runner: The runner of all micro-batches; None to run them one after another.
        actions: The scheduled actions of this one, in their order.

    Attributes:
        stage: The present stage.
        unnamed: The number of blocks without a name so far.
    """

    def __init__(
        self,
        pipeline: PipelineRun,
        micro_batch: int,
        replica: int,
        runner: ScheduleRunner | None = None,
        actions: Sequence[ScheduledAction] = (),
    ) -> None:
        self._stages, self._instruments = pipeline.stages, pipeline.instruments
        self._micro_batch, self._replica = micro_batch, replica
        self._runner, self._actions = runner, deque(actions)
        self._last_planned = max((one.action.stage for one in actions), default=sys.maxsize)
        self._kind = ActionKind.FORWARD
        self.stage = self.unnamed = 0
        self._begins = [0]  # autograd's sequence numbers at which the stages begin
        self._begun_s = 0.0

    @property
    def is_at_once(self) -> bool:
        """Whether other micro-batches run at the same time."""
        return self._runner is not None

    def run(self, work: Work) -> None:
        """Go through the stages. If it fails, no other micro-batch waits for this one."""
        with _cursor.using(self):
            try:
                self._begins = [_sequence_number()]
                self._wait()
                work(self._micro_batch, self)
            except BaseException:
                if self._runner is not None:
                    self._runner.give_up()
                raise

    def begin(self, name: str | None, ipu: int | None) -> None:
        """Enter a block. If a new stage begins with it, wait until that stage may run.

        Code between the end of a block and the next one belongs to the same stage.

        Raises:
            StrategyError: If the block belongs to an earlier stage, or to one that the first step did not have.
        """
        if name is None:
            name, self.unnamed = str(self.unnamed), self.unnamed + 1
        self._advance(self._stages.of(name, ipu), name)

    def _advance(self, stage: int, name: str) -> None:
        if stage < self.stage:
            raise StrategyError(
                f"block {name!r} of stage {stage} begins after stage {self.stage}; the order of stages must follow the "
                "data flow: number them so, or put both blocks into one stage"
            )
        if stage > self._last_planned:
            raise StrategyError(
                f"block {name!r} of stage {stage} was missing in the first step, from which the pipeline was planned; "
                "enter the same blocks in every step"
            )
        while self.stage < stage:
            self._done()
            self.stage += 1
            self._begins.append(_sequence_number())
            self._wait()

    def backward(self, loss: torch.Tensor) -> None:
        """End the forward pass with a loss, and run its backward pass when it may begin."""
        self._advance(self._last_stage, "the loss")
        if self.stage:
            for stage, node in entries_of(loss, self._begins, self._stages).items():
                if stage != self.stage:
                    node.register_prehook(partial(self._go_back, stage))
        self._done()
        self._kind = ActionKind.BACKWARD
        self._wait()
        loss.backward()
        self._go_back(0)
        self._done()

    def leave(self) -> None:
        """End a forward pass that has no backward pass."""
        self._advance(self._last_stage, "the end")
        self._done()

    @property
    def _last_stage(self) -> int:
        """The number of the last stage met so far by any micro-batch."""
        return max(self.stage, len(self._stages.devices()) - 1)

    def _go_back(self, stage: int, _: object = None) -> None:
        """End the backward passes of later stages, and wait until `stage` may run. Called by autograd."""
        while self.stage > stage:
            self._done()
            self.stage -= 1
            self._wait()

    def _wait(self) -> None:
        """Wait until the next action may begin.

        Raises:
            AbandonedError: If another micro-batch has failed.
        """
        if self._runner is not None:
            action = self._actions[0].action
            assert (action.kind, action.stage) == (self._kind, self.stage), f"stage {self.stage}, not {action}"
            self._runner.wait(self._actions[0])
            self._begun_s = self._runner.clock()
        self._instruments.replica_begins(self._replica, self.stage)

    def _done(self) -> None:
        self._instruments.replica_ends(self._replica, self.stage, self._micro_batch)
        if self._runner is not None:
            ended = self._actions.popleft()
            self._runner.done(ended, self._begun_s, self._actions[0] if self._actions else None)


def drawing(seed: int, device: torch.device, cursor: StageCursor | None) -> AbstractContextManager[None]:
    """Let a micro-batch draw its random numbers. If others run at the same time, its thread has a generator of its own.

    Args:
        seed: The seed of the micro-batch.
        device: The device of the replica.
        cursor: The stage of the micro-batch; None without a pipeline.
    """
    if cursor is not None and cursor.is_at_once:
        return drawing_in_thread(seed)
    seed_generators(seed, device)
    return nullcontext()
