"""How PopTorch's programs mark the blocks of a model, and how strategies of execution make stages of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch

from strategies.compat.poptorch.enums import AutoStage
from strategies.compat.poptorch.without_effect import Accepted, Accepting, methods_of
from strategies.errors import StrategyError
from strategies.pipelines.schedules import PipelineSchedule, schedule_named
from strategies.torch.stages import TorchPipeline, begin_block, end_block, number_from_zero


class Block(torch.nn.Module):
    """A part of a forward pass: `with poptorch.Block("B1", ipu_id=0): ...`.

    Args:
        user_id: its name; blocks of one name are one. None: the number of such blocks before, see `useAutoId`.
        ipu_id: the simulated device on which it runs, where no strategy of execution says so.
    """

    def __init__(self, user_id: str | None = None, ipu_id: int | None = None) -> None:
        super().__init__()
        self._user_id, self._ipu_id = user_id, ipu_id

    @staticmethod
    def useAutoId() -> None:
        """Begin to number blocks without a name at 0; call it at the beginning of `forward`."""
        number_from_zero()

    @staticmethod
    def start(user_id: str | None = None, ipu_id: int | None = None) -> None:
        """Begin a block that lasts until the next one."""
        begin_block(user_id, ipu_id)

    def __enter__(self) -> None:
        begin_block(self._user_id, self._ipu_id)

    def __exit__(self, *error: object) -> None:
        end_block()


class _Begin:
    """Begins a block before a module runs."""

    def __init__(self, user_id: str | None, ipu_id: int | None) -> None:
        self._user_id, self._ipu_id = user_id, ipu_id

    def __call__(self, module: torch.nn.Module, given: object) -> None:
        begin_block(self._user_id, self._ipu_id)

    def __repr__(self) -> str:
        return f"BeginBlock(user_id={self._user_id}, ipu_id={self._ipu_id})"


def BeginBlock(
    layer_to_call: torch.nn.Module, user_id: str | None = None, ipu_id: int | None = None
) -> torch.nn.Module:
    """Have a block begin with a submodule, and last until the next block; the same module.

    Raises:
        StrategyError: if it begins one already.
        TypeError: if it is no module.
    """
    if not isinstance(layer_to_call, torch.nn.Module):
        raise TypeError(f"{type(layer_to_call).__name__} is no module; mark functions with poptorch.BlockFunction")
    if any(isinstance(hook, _Begin) for hook in layer_to_call._forward_pre_hooks.values()):
        raise StrategyError("the module begins a block already; poptorch.removeBlocks takes the mark away")
    layer_to_call.register_forward_pre_hook(_Begin(user_id, ipu_id))
    return layer_to_call


def removeBlocks(module: torch.nn.Module) -> None:
    """Take the marks of `BeginBlock` away, from all submodules."""
    for inner in module.modules():
        hooks = inner._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, _Begin)]:
            del hooks[key]


@contextmanager
def BlockFunction(user_id: str | None = None, ipu_id: int | None = None) -> Iterator[None]:
    """Decorate a function: all that it calls is in the block."""
    with Block(user_id, ipu_id):
        yield


# ---- stages


class Stage:
    """Blocks that run on one device, one after another.

    Args:
        block_ids: their names.
    """

    def __init__(self, *block_ids: str) -> None:
        if not block_ids or not all(isinstance(name, str) for name in block_ids):
            raise TypeError(
                f"a stage is made of names of blocks, and these are {block_ids}; poptorch.Stage('B1', 'B2')"
            )
        self.blocks = list(block_ids)
        self.device: int | None = None

    def ipu(self, ipu: int) -> Stage:
        """Run on this device."""
        self.device = ipu
        return self

    def __repr__(self) -> str:
        where = "" if self.device is None else f".ipu({self.device})"
        return f"Stage({', '.join(map(repr, self.blocks))}){where}"


class Phase:
    """Stages that a phased strategy runs one after another, and that share nothing with those of other phases.

    Args:
        stages: stages, or names of the blocks of one.

    Raises:
        TypeError: if there is something else, both, or nothing.
    """

    def __init__(self, *stages: Stage | str) -> None:
        own = [each for each in stages if isinstance(each, Stage)]
        names = [each for each in stages if isinstance(each, str)]
        if not stages or len(stages) not in (len(own), len(names)):
            raise TypeError(
                f"a phase is made of stages, or of names of blocks, and this of {stages}; poptorch.Phase('B1', 'B2') "
                "or poptorch.Phase(poptorch.Stage('B1'), poptorch.Stage('B2'))"
            )
        self.stages = own or [Stage(*names)]

    def stage(self, number: int) -> Stage:
        """Return one of the stages."""
        return self.stages[number]

    def ipus(self, *ipus: int) -> Phase:
        """Set the device of each stage.

        Raises:
            ValueError: if there are not as many.
        """
        if len(ipus) != len(self.stages):
            raise ValueError(
                f"the phase has {len(self.stages)} stages, and there are {len(ipus)} devices; one for each"
            )
        for stage, ipu in zip(self.stages, ipus, strict=True):
            stage.ipu(ipu)
        return self


@dataclass
class FoundStages:
    """Finds the stage and the device of each block, as a forward pass meets them.

    Attributes:
        stages: that a strategy has listed; with none blocks make their own.
        auto_stage: how they do.
        is_lenient: whether a block without a device belongs to the stage that was found last.
        found: (stage, device) for each name that was met.
    """

    stages: Sequence[Stage]
    auto_stage: AutoStage
    is_lenient: bool = False
    found: dict[str, tuple[int, int]] = field(default_factory=dict)

    def of(self, name: str, ipu: int | None) -> tuple[int, int]:
        """Return the number of the stage of a block, and its device.

        Raises:
            StrategyError: if no stage has it, or it says no device where there are no stages.
        """
        if self.stages:
            self.found[name] = self._listed(name)
        elif name not in self.found:
            self.found[name] = self._made(name, ipu)
        return self.found[name]

    def unmet(self) -> list[str]:
        """See `strategies.torch.stages.StagePlacing`."""
        return [name for stage in self.stages for name in stage.blocks if name not in self.found]

    def _listed(self, name: str) -> tuple[int, int]:
        for number, stage in enumerate(self.stages):
            if name in stage.blocks:
                return number, number if stage.device is None else stage.device
        known = ", ".join(repr(block) for stage in self.stages for block in stage.blocks)
        raise StrategyError(f"there is no stage with the block {name!r}; those of the strategy are {known}")

    def _made(self, name: str, ipu: int | None) -> tuple[int, int]:
        if self.auto_stage is AutoStage.AutoIncrement:
            number = len(self.found)
            return number, number if ipu is None else ipu
        if ipu is not None:
            return ipu, ipu
        if self.is_lenient:
            return next(reversed(self.found.values()), (0, 0))
        raise StrategyError(
            f"block {name!r} has no ipu_id, and the strategy lists no stages; give the block one, or write "
            "poptorch.PipelinedExecution('B1', 'B2', ...), or have each block begin a stage with "
            "poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement)"
        )


class ExecutionStrategy:
    """The stages of a model and their order: a list of stages, names of blocks for a stage each, or an `AutoStage`.

    Args:
        stages: see above.
        schedule: of pipelines, by name; not PopTorch's. Every one gives the same bits.

    Raises:
        StrategyError: if a block is in two stages.
        ValueError: if there is no such schedule.
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
            StrategyError: if there is none.
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
    raise TypeError(f"{each!r} is no stage; use poptorch.Stage('B1'), a name of a block, or a list of names")


def _phase_of(each: Any) -> Phase:
    if isinstance(each, Phase):
        return each
    return Phase(each) if isinstance(each, Stage | str) else Phase(*each)


class PipelinedExecution(ExecutionStrategy):
    """Stages work on different micro-batches at once, each on its device; needs gradient accumulation to train."""


class ShardedExecution(ExecutionStrategy):
    """Stages on several devices, and one micro-batch at a time."""

    overlaps = False


_IN_MEMORY = "nothing leaves the memory between phases"


class _Phased(Accepting, ExecutionStrategy):
    """Base of phased strategies, which run as shards here, since there is one memory.

    Args:
        phases: phases, lists of stages, or lists of names of blocks; a stage or a name is a phase alone. Or one list of
            phases.
    """

    overlaps = False
    _methods = methods_of(
        "PhasedExecution",
        useSeparateBackwardPhase=Accepted(lambda use=True: use, _IN_MEMORY, True),
    )

    def __init__(self, *phases: Phase | Stage | str | Sequence[Phase | Stage | str]) -> None:
        if len(phases) == 1 and isinstance(phases[0], list) and any(isinstance(each, Phase) for each in phases[0]):
            phases = tuple(phases[0])
        if not phases:
            raise ValueError("a phased strategy needs its phases; poptorch.SerialPhasedExecution(['B1'], ['B2'])")
        self.phases = [_phase_of(each) for each in phases]
        super().__init__(*(stage for phase in self.phases for stage in phase.stages))

    def phase(self, phase: int) -> Phase:
        """Return one of the phases."""
        return self.phases[phase]


@final
class ParallelPhasedExecution(_Phased):
    """Phases that alternate between devices; executed as `ShardedExecution` of their stages."""

    _methods = {
        **_Phased._methods,
        **methods_of(
            "ParallelPhasedExecution",
            sendTensorsOffChipAfterFwd=Accepted(lambda off_chip=True: off_chip, _IN_MEMORY, True),
        ),
    }


@final
class SerialPhasedExecution(_Phased):
    """Phases one after another on the same devices; executed as `ShardedExecution` of their stages."""

    _methods = {
        **_Phased._methods,
        **methods_of("SerialPhasedExecution", setTensorsLiveness=Accepted(lambda liveness: liveness, _IN_MEMORY)),
    }
