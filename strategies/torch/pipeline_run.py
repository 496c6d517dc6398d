"""Carries out a timetable for one replica: a thread for each micro-batch, which waits for its turn at each stage.

The forward pass of a micro-batch is told when blocks begin. Backward passes need not be cut: autograd numbers what it
records as it records it, and goes back from the highest number to the lowest. So the first node of a stage that
autograd comes to is known from the numbers at which the stage began and ended, and a hook there waits for the stage's
turn. All kernels are those of a pass without a pipeline, and so are all bits: in each stage micro-batches keep
their order. Where a schedule takes backward passes apart the thread goes through the stages a third time, for the
gradients of parameters (`strategies.torch.split_backward`).
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from collectives.instruments import Instruments
from strategies.errors import StrategyError
from strategies.pipelines.running.driver import AbandonedError
from strategies.pipelines.schedules import schedule_named
from strategies.pipelines.timetable import ActionKind, StageAction, Timed, Timetable, placed
from strategies.torch.buffer_uses import BufferUses
from strategies.torch.split_backward import SplitBackward, nodes_below
from strategies.torch.stages import Pipeline, Placing, watch
from strategies.torch.weights_behind import weights_behind

_sequence_number = torch._C._autograd._get_sequence_nr


@dataclass(frozen=True)
class SeenBy:
    """Who is told of stages.

    Attributes:
        instruments: they are.
        replica: the index of the replica whose stages they are.
    """

    instruments: Instruments = field(default_factory=Instruments)
    replica: int = 0


class PipelineRun:
    """One replica's pipeline, step after step.

    The first step runs its micro-batches one after another, to learn the stages; the others follow the timetable. Where
    all stages are on one device there is nothing to do at once, and no timetable is followed.

    Args:
        pipeline: how stages run.
        count: micro-batches of a step.
        intra_op_threads: of each.
        module: whose buffers are looked after.
        training: whether micro-batches go back.
        seen_by: is told when a stage begins and ends with a micro-batch.

    Attributes:
        spans: when each device did what in the last step; empty after the first one.

    Raises:
        StrategyError: from `each`, see `Walk` and `_Stages`.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        count: int,
        intra_op_threads: int,
        module: torch.nn.Module,
        training: bool = True,
        seen_by: SeenBy | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._count = count
        self._stages = _Stages(pipeline.placing())
        self._timetable: Timetable | None = None
        self._followers: Mapping[StageAction, Sequence[StageAction]] = {}
        self._overlaps = False
        self._trains = training
        self._seen_by = seen_by or SeenBy()
        self._module = module
        self._threads = ThreadPoolExecutor(count, "micro-batch", torch.set_num_threads, (intra_op_threads,))
        self.spans: Sequence[Timed] = ()
        for name, inner in module.named_modules():
            if inner._buffers and training:
                inner.register_forward_pre_hook(partial(self._stages.enter_module, name))

    def each(self, work: Callable[[int, Walk], None]) -> None:
        """Do something for each micro-batch, as the timetable says.

        Args:
            work: called with the number of a micro-batch and its way through the pipeline, in a thread of its own.

        Raises:
            BaseException: what it has raised for one of them.
        """
        if self._timetable is None or not self._overlaps:
            for number in range(self._count):
                walk = Walk(self._stages, number, None, self._seen_by)
                if number == 0 and self._timetable is None and self._trains:
                    self._look(walk, work)
                else:
                    _walk(walk, work)
            if self._timetable is None:
                self._timetable = self._planned()
                self._followers = followers_in(self._timetable)
                self._overlaps = len(self._timetable.devices) > 1
            return
        drive = MicroBatches(self._timetable, self._followers)
        walks = [Walk(self._stages, number, drive, self._seen_by) for number in range(self._count)]
        begun = [self._threads.submit(_walk, walk, work) for walk in walks]
        errors = [error for future in begun if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda one: isinstance(one, AbandonedError)):
            raise error
        self.spans = drive.spans

    def _look(self, walk: Walk, work: Callable[[int, Walk], None]) -> None:
        """The first micro-batch, which shows where buffers are used."""
        with BufferUses(self._module, lambda: walk.stage) as uses:
            _walk(walk, work)
        uses.refuse_changes_that_cross()

    def _planned(self) -> Timetable:
        """The timetable, of the stages that the first step has met."""
        devices = self._stages.devices()
        if self._trains:
            self._stages.refuse_unmet()
        if self._pipeline.needs_full and len(devices) > self._count:
            what, count = ("step", "a gradient accumulation") if self._trains else ("call", "deviceIterations")
            raise StrategyError(
                f"the pipeline has {len(devices)} stages, and a {what} {self._count} micro-batches, which cannot fill "
                f"it; use {count} of {len(devices)} or more, or poptorch.ShardedExecution"
            )
        numbers = {device: number for number, device in enumerate(sorted(set(devices)))}
        schedule = schedule_named(self._pipeline.schedule)
        timetable = schedule.timetable(placed([numbers[device] for device in devices]), self._count, self._trains)
        has_several = len(timetable.devices) < timetable.num_stages
        return weights_behind(timetable) if timetable.has_split_backward and has_several else timetable

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=True)


class _Stages:
    """What is known of the stages of a module, by all micro-batches of a replica.

    Args:
        placing: finds them.
    """

    def __init__(self, placing: Placing) -> None:
        self._placing = placing
        self._devices: dict[int, int] = {}  # of each stage that was met
        self._of_parameters: dict[int, int] = {}  # the device on which a parameter is used, by its id
        self._of_modules: dict[str, int] = {}  # the stage in which a module with buffers runs
        self._lock = threading.Lock()

    def of(self, name: str, ipu: int | None) -> int:
        """The stage of a block."""
        with self._lock:
            stage, device = self._placing.of(name, ipu)
            self._devices.setdefault(stage, device)
        return stage

    def refuse_unmet(self) -> None:
        """Look for blocks that are in no micro-batch.

        Raises:
            StrategyError: if a stage has one.
        """
        if unmet := self._placing.unmet():
            raise StrategyError(
                f"a stage has the block {unmet[0]!r}, which no micro-batch of the first step has entered; mark it in "
                f"the model with poptorch.Block({unmet[0]!r}), or leave it out of the strategy"
            )

    def devices(self) -> list[int]:
        """For each stage its device; of stages that were not met that of the one before."""
        found: list[int] = []
        for stage in range(1 + max(self._devices, default=0)):
            found.append(self._devices.get(stage, found[-1] if found else 0))
        return found

    def device_of(self, stage: int) -> int:
        """The device of a stage."""
        return self._devices.get(stage, stage)

    def use(self, parameter: torch.Tensor, stage: int) -> None:
        """A stage uses a parameter.

        Raises:
            StrategyError: if another one on another device does, too.
        """
        device = self.device_of(stage)
        other = self._of_parameters.setdefault(id(parameter), device)
        if other != device:
            raise StrategyError(
                f"a parameter of shape {list(parameter.shape)} is used on the devices {other} and {device}; put the "
                "blocks that use it on one device"
            )

    def enter_module(self, name: str, module: torch.nn.Module, given: Any) -> None:
        """A module with buffers runs.

        Raises:
            StrategyError: if it does in two stages, whose micro-batches would change the buffers in another order.
        """
        walk = _of_thread.walk
        if walk is None:
            return
        stage = self._of_modules.setdefault(name, walk.stage)
        if stage != walk.stage:
            raise StrategyError(
                f"module {name} has buffers, and runs in the stages {stage} and {walk.stage}, whose micro-batches "
                "would meet there out of order; put both blocks into one stage"
            )


class _OfThread(threading.local):
    walk: Walk | None = None


_of_thread = _OfThread()


class Walk:
    """The way of a micro-batch through the stages, forward and back; told of blocks in its thread.

    Args:
        stages: what is known of them.
        micro_batch: its number.
        turns: whose turn it is; None where micro-batches come one after another.
        seen_by: is told.

    Attributes:
        stage: where it is.
    """

    def __init__(self, stages: _Stages, micro_batch: int, turns: MicroBatches | None, seen_by: SeenBy) -> None:
        self._stages = stages
        self._micro_batch = micro_batch
        self._turns = turns
        self._seen_by = seen_by
        self._kind = ActionKind.FORWARD
        self.stage = 0
        self._split: SplitBackward | None = None
        self._begins = [0]  # autograd's numbers at which the stages begin
        self._around: list[int] = []  # the stages of the blocks that are around this one

    def start(self) -> None:
        """Enter the first stage."""
        self._begins = [_sequence_number()]
        self._wait()

    def begin(self, name: str, ipu: int | None) -> None:
        """See `Watcher`.

        Raises:
            StrategyError: if the block is of an earlier stage.
        """
        self._around.append(self.stage)
        self._advance(self._stages.of(name, ipu), name)

    def end(self) -> None:
        """See `Watcher`; what follows before the next block belongs to this stage still."""
        self._around.pop()

    def _advance(self, stage: int, name: str) -> None:
        if stage < self.stage:
            raise StrategyError(
                f"block {name!r} of stage {stage} begins behind stage {self.stage}; stages follow each other as the "
                "data flow: number them so, or put both blocks into one"
            )
        if self._turns is not None and stage >= self._turns.timetable.num_stages:
            raise StrategyError(
                f"block {name!r} of stage {stage} was not there in the first step, by which the pipeline was planned; "
                "enter the same blocks in every step"
            )
        while self.stage < stage:
            self._done()
            self.stage += 1
            self._begins.append(_sequence_number())
            self._wait()

    def turn_round(self, loss: torch.Tensor, last: int) -> None:
        """The forward pass has ended with a loss: wait for the turn of its backward pass.

        Args:
            loss: from which autograd goes back.
            last: the number of the last stage.
        """
        self._advance(last, "the loss")
        if self._turns is not None and self._turns.timetable.has_split_backward:
            self._split = SplitBackward(loss, self._stage_of)
        firsts = self._first_nodes(loss) if last else {}
        self._done()
        self._kind = ActionKind.BACKWARD if self._split is None else ActionKind.BACKWARD_INPUTS
        self._wait()
        for stage, node in firsts.items():
            if stage != self.stage:
                node.register_prehook(partial(self._go_back, stage))

    def back(self, loss: torch.Tensor) -> None:
        """The backward pass, from the loss that `turn_round` was given."""
        if self._split is None:
            loss.backward()
        else:
            self._split.of_inputs()
        self._go_back(0)
        self._done()
        if self._split is not None:
            self._go_through_weights(self._split, self._turns)

    def _go_through_weights(self, split: SplitBackward, turns: MicroBatches | None) -> None:
        assert turns is not None
        self._kind = ActionKind.BACKWARD_WEIGHTS
        for self.stage in range(turns.timetable.num_stages):
            self._wait()
            split.of_weights(self.stage)
            self._done()

    def leave(self) -> None:
        """The forward pass has ended, and there is no backward pass."""
        self._advance(self.last_stage, "the end")
        self._done()

    @property
    def last_stage(self) -> int:
        """The number of the last stage, as far as is known."""
        return max(self.stage, len(self._stages.devices()) - 1)

    def _go_back(self, stage: int, _: Any = None) -> None:
        """Autograd comes to a stage."""
        while self.stage > stage:
            self._done()
            self.stage -= 1
            self._wait()

    def _stage_of(self, node: Any) -> int:
        """Which stage has recorded a node; 0 where it was there before."""
        return max(bisect_right(self._begins, node._sequence_nr()) - 1, 0)

    def _first_nodes(self, loss: torch.Tensor) -> dict[int, Any]:
        """For each stage the node that autograd comes to first; parameters are looked at on the way."""
        firsts: dict[int, tuple[int, Any]] = {}
        for node in nodes_below(loss.grad_fn):
            number, stage = node._sequence_nr(), self._stage_of(node)
            is_run = self._split is None or node in self._split.of_first_part
            if is_run and number >= self._begins[0] and number > firsts.get(stage, (-1, None))[0]:
                firsts[stage] = number, node
            for parameter in _parameters_of(node):
                self._stages.use(parameter, stage)
        return {stage: node for stage, (_, node) in firsts.items()}

    def _wait(self) -> None:
        if self._turns is not None:
            self._turns.wait(StageAction(self._kind, self.stage, self._micro_batch))
        self._seen_by.instruments.replica_begins(self._seen_by.replica, self.stage)

    def _done(self) -> None:
        self._seen_by.instruments.replica_ends(self._seen_by.replica, self.stage, self._micro_batch)
        if self._turns is not None:
            self._turns.done(StageAction(self._kind, self.stage, self._micro_batch))

    def give_up(self) -> None:
        """Have all micro-batches end."""
        if self._turns is not None:
            self._turns.give_up()


def _walk(walk: Walk, work: Callable[[int, Walk], None]) -> None:
    watch(walk)
    _of_thread.walk = walk
    try:
        walk.start()
        work(walk._micro_batch, walk)
    except BaseException:
        walk.give_up()
        raise
    finally:
        watch(None)
        _of_thread.walk = None


def _parameters_of(node: Any) -> Iterator[torch.Tensor]:
    """The parameters that a node hands gradients to."""
    return (following.variable for following, _ in node.next_functions if hasattr(following, "variable"))


@dataclass
class MicroBatches:
    """Whose turn it is while a timetable is followed once.

    A thread is woken once for each action, by the last of what the action needs.

    Attributes:
        timetable: what each device does, in which order.
        followers: what `followers_in` says of it.
        clock: seconds.
    """

    timetable: Timetable
    followers: Mapping[StageAction, Sequence[StageAction]]
    clock: Callable[[], float] = time.perf_counter
    _missing: Counter[StageAction] = field(default_factory=Counter)  # how much of what an action needs has not ended
    _gates: dict[StageAction, threading.Lock] = field(default_factory=dict)  # locked until it is its turn
    _changing: threading.Lock = field(default_factory=threading.Lock)
    _begun_s: dict[StageAction, float] = field(default_factory=dict)
    _spans: list[Timed] = field(default_factory=list)
    _has_failed: bool = False

    def __post_init__(self) -> None:
        for following in self.followers.values():
            self._missing.update(following)
        self._gates = {action: threading.Lock() for action in self.followers}
        for action in self._missing:
            self._gates[action].acquire()
        self._start_s = self.clock()

    @property
    def spans(self) -> Sequence[Timed]:
        """When each device did what, in the order of the begins; updates, made for all stages at once, come last."""
        in_order = sorted(self._spans, key=lambda span: (span.begin_s, span.device, span.end_s))
        if not self.timetable.training:
            return in_order
        end_s = max(span.end_s for span in in_order)
        places = enumerate(self.timetable.mapping)
        updates = [
            Timed(device, StageAction(ActionKind.UPDATE, stage, None), end_s, end_s)
            for stage, devices in places
            for device in devices
        ]
        return [*in_order, *updates]

    def wait(self, action: StageAction) -> None:
        """Return when it is an action's turn.

        Raises:
            AbandonedError: another micro-batch has failed.
        """
        self._gates[action].acquire()
        if self._has_failed:
            raise AbandonedError(f"the {action} is given up: another micro-batch has failed")
        self._begun_s[action] = self.clock() - self._start_s

    def done(self, action: StageAction) -> None:
        """An action has ended."""
        end_s = self.clock() - self._start_s
        for device in self.timetable.mapping[action.stage]:
            self._spans.append(Timed(device, action, self._begun_s[action], end_s))
        with self._changing:
            if not self._has_failed:
                for following in self.followers[action]:
                    self._missing[following] -= 1
                    if not self._missing[following]:
                        self._gates[following].release()

    def give_up(self) -> None:
        """Have all end that wait."""
        with self._changing:
            if not self._has_failed:
                self._has_failed = True
                for action, missing in self._missing.items():
                    if missing:
                        self._gates[action].release()


def followers_in(timetable: Timetable) -> Mapping[StageAction, Sequence[StageAction]]:
    """For each action those that need its end: by the data, or as the next ones of the device; no updates."""
    found: dict[StageAction, list[StageAction]] = {
        action: [] for actions in timetable.devices for action in actions if action.kind is not ActionKind.UPDATE
    }
    for actions in timetable.devices:
        own = [action for action in actions if action.kind is not ActionKind.UPDATE]
        for before, action in zip([None, *own], own, strict=False):
            for needed in {*timetable.dependencies(action), *([] if before is None else [before])}:
                found[needed].append(action)
    return found
