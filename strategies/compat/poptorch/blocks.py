"""Blocks that PopTorch's programs mark in a model, and the execution strategies that make stages of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch

from strategies.compat.poptorch.names import Accepting, AutoStage, Rows, TableRow, switch
from strategies.errors import StrategyError
from strategies.pipelines.timetable import PipelineSchedule, schedule_named
from strategies.torch.pipelines import TorchPipeline, begin_block, number_from_zero


class Block(torch.nn.Module):
    """A part of a forward pass: `with poptorch.Block("B1", ipu_id=0): ...`.

    Args:
        user_id: Name of the block; blocks of one name are one block. None for the number of unnamed blocks so far (see
            `useAutoId`).
        ipu_id: Simulated device of the block if no execution strategy assigns one.
    """

    def __init__(self, user_id: str | None = None, ipu_id: int | None = None) -> None:
        super().__init__()
        self._user_id, self._ipu_id = user_id, ipu_id

    @staticmethod
    def useAutoId() -> None:
        """Restart the numbering of unnamed blocks at 0; call it at the beginning of `forward`."""
        number_from_zero()

    @staticmethod
    def start(user_id: str | None = None, ipu_id: int | None = None) -> None:
        """Begin a block that lasts until the next block begins."""
        begin_block(user_id, ipu_id)

    def __enter__(self) -> None:
        begin_block(self._user_id, self._ipu_id)

    def __exit__(self, *error: object) -> None:
        """Do nothing: code up to the next block belongs to the same stage."""


def _begin(user_id: str | None, ipu_id: int | None, module: torch.nn.Module, given: object) -> None:
    """Begin a block before a module runs: a hook, as a `partial` with the first two arguments."""
    begin_block(user_id, ipu_id)


def _marks_of(module: torch.nn.Module) -> list[int]:
    """Return the keys of the hooks that begin a block."""
    return [key for key, hook in module._forward_pre_hooks.items() if getattr(hook, "func", None) is _begin]


def BeginBlock(
    layer_to_call: torch.nn.Module, user_id: str | None = None, ipu_id: int | None = None
) -> torch.nn.Module:
    """Let a block begin at a submodule and last until the next block; return the same module.

    Raises:
        StrategyError: If the submodule already begins a block.
        TypeError: If `layer_to_call` is not a module.
    """
    if not isinstance(layer_to_call, torch.nn.Module):
        raise TypeError(f"{type(layer_to_call).__name__} is not a module; mark functions with poptorch.BlockFunction")
    if _marks_of(layer_to_call):
        raise StrategyError("the module already begins a block; remove the mark with poptorch.removeBlocks")
    layer_to_call.register_forward_pre_hook(partial(_begin, user_id, ipu_id))
    return layer_to_call


def removeBlocks(module: torch.nn.Module) -> None:
    """Remove the marks of `BeginBlock` from all submodules."""
    for inner in module.modules():
        for key in _marks_of(inner):
            del inner._forward_pre_hooks[key]


@contextmanager
def BlockFunction(user_id: str | None = None, ipu_id: int | None = None) -> Iterator[None]:
    """Put everything that the decorated function calls in a block."""
    with Block(user_id, ipu_id):
        yield


# ---- stages


class Stage:
    """Blocks that run on one device, one after another.

    Args:
        block_ids: Names of the blocks.

    Example::

        poptorch.PipelinedExecution(poptorch.Stage("B1", "B2"), poptorch.Stage("B3").ipu(1))
    """

    def __init__(self, *block_ids: str) -> None:
        if not block_ids or not all(isinstance(name, str) for name in block_ids):
            raise TypeError(f"a stage needs names of blocks, but got {block_ids}; write poptorch.Stage('B1', 'B2')")
        self.blocks = list(block_ids)
        self.device: int | None = None

    def ipu(self, ipu: int) -> Stage:
        """Set the device of the stage, and return the stage."""
        self.device = ipu
        return self

    def __repr__(self) -> str:
        where = "" if self.device is None else f".ipu({self.device})"
        return f"Stage({', '.join(map(repr, self.blocks))}){where}"


class Phase:
    """Stages that a phased strategy runs one after another; stages of different phases share nothing.

    Args:
        stages: Stages, or names of the blocks of one stage.

    Raises:
        TypeError: If `stages` is empty, mixes stages and names, or has other objects.
    """

    def __init__(self, *stages: Stage | str) -> None:
        own = [each for each in stages if isinstance(each, Stage)]
        names = [each for each in stages if isinstance(each, str)]
        if not stages or len(stages) not in (len(own), len(names)):
            raise TypeError(
                f"a phase needs stages, or names of blocks, but got {stages}; write poptorch.Phase('B1', 'B2') "
                "or poptorch.Phase(poptorch.Stage('B1'), poptorch.Stage('B2'))"
            )
        self.stages = own or [Stage(*names)]

    def stage(self, number: int) -> Stage:
        """Return one of the stages."""
        return self.stages[number]

    def ipus(self, *ipus: int) -> Phase:
        """Set the device of each stage, and return the phase.

        Raises:
            ValueError: If their numbers differ.
        """
        if len(ipus) != len(self.stages):
            raise ValueError(
                f"the phase has {len(self.stages)} stages, but {len(ipus)} devices are given; give one for each stage"
            )
        for stage, ipu in zip(self.stages, ipus, strict=True):
            stage.ipu(ipu)
        return self


@dataclass
class FoundStages:
    """The stages and devices of blocks, found as a forward pass meets the blocks.

    Attributes:
        stages: Stages that a strategy lists; if empty, blocks make their own stages.
        auto_stage: Rule for stages that blocks make.
        is_lenient: Whether a block without a device joins the stage found last.
        found: (stage, device) by the name of each block that was met.
    """

    stages: Sequence[Stage]
    auto_stage: AutoStage
    is_lenient: bool = False
    found: dict[str, tuple[int, int]] = field(default_factory=dict)

    def of(self, name: str, ipu: int | None) -> tuple[int, int]:
        """Return the number of a block's stage, and its device.

        Raises:
            StrategyError: If no listed stage has the block, or if it needs a device and has none.
        """
        if self.stages:
            self.found[name] = self._listed(name)
        elif name not in self.found:
            self.found[name] = self._made(name, ipu)
        return self.found[name]

    def unmet(self) -> list[str]:
        """Return the listed blocks that the forward pass has not met, for `StagePlacing`."""
        return [name for stage in self.stages for name in stage.blocks if name not in self.found]

    def _listed(self, name: str) -> tuple[int, int]:
        for number, stage in enumerate(self.stages):
            if name in stage.blocks:
                return number, number if stage.device is None else stage.device
        known = ", ".join(repr(block) for stage in self.stages for block in stage.blocks)
        raise StrategyError(f"no stage has the block {name!r}; the strategy lists the blocks {known}")

    def _made(self, name: str, ipu: int | None) -> tuple[int, int]:
        if self.auto_stage is AutoStage.AutoIncrement:
            number = len(self.found)
            return number, number if ipu is None else ipu
        if ipu is not None:
            return ipu, ipu
        if self.is_lenient:
            return next(reversed(self.found.values()), (0, 0))
        raise StrategyError(
            f"block {name!r} has no ipu_id, and the strategy lists no stages; give the block an ipu_id, or write "
            "poptorch.PipelinedExecution('B1', 'B2', ...), or let each block begin a stage with "
            "poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement)"
        )


class ExecutionStrategy:
    """The stages of a model, and the order of their work.

    Args:
        stages: Stages, names of blocks for a stage each, lists of names for a stage each, or one `AutoStage`.
        schedule: Schedule of a pipeline by name, an addition to PopTorch. Every schedule gives the same bits.

    Raises:
        StrategyError: If a block is in two stages.
        ValueError: If the schedule does not exist.
    """

    overlaps = True

    def __init__(
        self,
        *stages: Stage | str | Sequence[str] | AutoStage,
        schedule: PipelineSchedule | str = PipelineSchedule.OneForwardOneBackward,
    ) -> None:
        schedule_named(schedule)
        self.schedule = schedule if self.overlaps else PipelineSchedule.Sequential
        self.auto_stage = AutoStage.SameAsIpu
        if len(stages) == 1 and isinstance(stages[0], AutoStage):
            self.auto_stage, stages = stages[0], ()
        self.stages = [_stage_of(each) for each in stages]
        seen: set[str] = set()
        for stage in self.stages:
            for name in stage.blocks:
                if name in seen:
                    raise StrategyError(f"block {name!r} is in two stages; give it to one of them")
                seen.add(name)

    def stage(self, block_id: str) -> Stage:
        """Return the stage of a block.

        Raises:
            StrategyError: If no stage has the block.
        """
        number, _ = self.placing.of(block_id, None)
        return self.stages[number]

    @property
    def pipeline(self) -> TorchPipeline:
        """The pipeline of a step."""
        return TorchPipeline(lambda: self.placing, self.schedule, self.overlaps)

    @property
    def placing(self) -> FoundStages:
        """A new search for stages."""
        return FoundStages(self.stages, self.auto_stage)

    def __repr__(self) -> str:
        inner = ", ".join(map(repr, self.stages)) or self.auto_stage.name
        return f"{type(self).__name__}({inner})"


def _stage_of(each: object) -> Stage:
    if isinstance(each, Stage):
        return each
    if isinstance(each, str):
        return Stage(each)
    if isinstance(each, Sequence):
        return Stage(*each)
    raise TypeError(f"{each!r} is not a stage; use poptorch.Stage('B1'), the name of a block, or a list of names")


def _phase_of(each: Any) -> Phase:
    if isinstance(each, Phase):
        return each
    return Phase(each) if isinstance(each, Stage | str) else Phase(*each)


class PipelinedExecution(ExecutionStrategy):
    """A pipeline: stages work on different micro-batches at once. Training needs gradient accumulation.

    Example::

        options.Training.gradientAccumulation(4)
        options.setExecutionStrategy(poptorch.PipelinedExecution("B1", "B2"))
    """


class ShardedExecution(ExecutionStrategy):
    """Stages on several devices that work on one micro-batch at a time."""

    overlaps = False


_IN_MEMORY = "nothing leaves the memory between phases"


class _Phased(Accepting, ExecutionStrategy):
    """Base of phased strategies, which run as shards here, because there is only one memory.

    Args:
        phases: Phases, lists of stages, or lists of names of blocks. A stage or a name alone is a phase. One list of
            phases is accepted, too.
    """

    overlaps = False
    _rows: Rows = {"useSeparateBackwardPhase": TableRow(lambda use=True: use, _IN_MEMORY, switch)}

    def __init__(self, *phases: Phase | Stage | str | Sequence[Phase | Stage | str]) -> None:
        if len(phases) == 1 and isinstance(phases[0], list) and any(isinstance(each, Phase) for each in phases[0]):
            phases = tuple(phases[0])
        if not phases:
            raise ValueError("a phased strategy needs phases; write poptorch.SerialPhasedExecution(['B1'], ['B2'])")
        self.phases = [_phase_of(each) for each in phases]
        super().__init__(*(stage for phase in self.phases for stage in phase.stages))

    def phase(self, phase: int) -> Phase:
        """Return one of the phases."""
        return self.phases[phase]


@final
class ParallelPhasedExecution(_Phased):
    """Phases that alternate between devices; they run as `ShardedExecution` of their stages."""

    _rows = {
        **_Phased._rows,
        "sendTensorsOffChipAfterFwd": TableRow(lambda off_chip=True: off_chip, _IN_MEMORY, switch),
    }


@final
class SerialPhasedExecution(_Phased):
    """Phases one after another on the same devices; they run as `ShardedExecution` of their stages."""

    _rows = {**_Phased._rows, "setTensorsLiveness": TableRow("liveness", _IN_MEMORY)}
