"""The stages of a pipeline: which blocks, parameters and buffers of a forward pass belong to each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import jax
import torch
from torch.overrides import TorchFunctionMode

from strategies.errors import StrategyError
from strategies.pipelines.schedules import PipelineSchedule
from strategies.torch.module_parts import Slot, slots_of
from strategies.torch.threads import ThreadValue


class StagePlacing(Protocol):
    """A finder of each block's stage, as forward passes meet blocks; it may learn while the first pass runs."""

    def of(self, name: str, ipu: int | None) -> tuple[int, int]:
        """Return the number of the stage of a block, and its device.

        Args:
            name: of the block.
            ipu: what the block says of the device.

        Raises:
            StrategyError: if there is none.
        """

    def unmet(self) -> list[str]:
        """Return the names of blocks that are expected, and were not met."""


class BlockWatcher(Protocol):
    """A watcher of the blocks that a forward pass enters, called in its thread.

    Attributes:
        stage: the stage in which the forward pass is.
    """

    stage: int

    def begin(self, name: str, ipu: int | None) -> None:
        """Take note of a block that begins, inside of another one or behind it."""

    def end(self) -> None:
        """Take note that the block of a `with` statement ends, and the one around it goes on."""


@dataclass(frozen=True)
class TorchPipeline:
    """Options of a pipeline whose stages run on simulated devices.

    Attributes:
        placing: makes what finds the stages.
        schedule: which stage works on which micro-batch when.
        needs_full: whether there have to be at least as many micro-batches as stages.
    """

    placing: Callable[[], StagePlacing]
    schedule: PipelineSchedule | str = PipelineSchedule.OneForwardOneBackward
    needs_full: bool = True


_watcher = ThreadValue[BlockWatcher | None](None)
_next_block = ThreadValue(0)


@contextmanager
def watching(watcher: BlockWatcher) -> Iterator[None]:
    """Have a watcher told of the blocks of this thread."""
    with _watcher.being(watcher), _next_block.being(0):
        yield


def number_from_zero() -> None:
    """Begin to number blocks without a name."""
    _next_block.now = 0


def begin_block(name: str | None, ipu: int | None) -> None:
    """Tell the watcher of a block that begins; without a name it gets the number of such blocks before."""
    watcher = _watcher.now
    if watcher is None:
        return
    if name is None:
        name, _next_block.now = str(_next_block.now), _next_block.now + 1
    watcher.begin(name, ipu)


def end_block() -> None:
    """Tell the watcher that the block of a `with` statement ends."""
    if _watcher.now is not None:
        _watcher.now.end()


class MetStages:
    """The stages of a module that the micro-batches of a replica have met."""

    def __init__(self, placing: StagePlacing) -> None:
        self._placing = placing
        self._devices: dict[int, int] = {}  # of each stage that was met
        self._of_parameters: dict[int, int] = {}  # the device on which a parameter is used, by its id
        self._of_modules: dict[str, int] = {}  # the stage in which a module with buffers runs
        self._lock = threading.Lock()

    def of(self, name: str, ipu: int | None) -> int:
        """Return the stage of a block."""
        with self._lock:
            stage, device = self._placing.of(name, ipu)
            self._devices.setdefault(stage, device)
        return stage

    def refuse_unmet(self) -> None:
        """Refuse stages with blocks that are in no micro-batch."""
        if unmet := self._placing.unmet():
            raise StrategyError(
                f"a stage has the block {unmet[0]!r}, which no micro-batch of the first step has entered; mark it in "
                f"the model with poptorch.Block({unmet[0]!r}), or leave it out of the strategy"
            )

    def devices(self) -> list[int]:
        """Return the device of each stage; of a stage that was not met that of the one before."""
        found: list[int] = []
        for stage in range(1 + max(self._devices, default=0)):
            found.append(self._devices.get(stage, found[-1] if found else 0))
        return found

    def use(self, parameter: torch.Tensor, stage: int) -> None:
        """Note that a stage uses a parameter.

        Raises:
            StrategyError: if another one on another device does, too.
        """
        device = self._devices.get(stage, stage)
        other = self._of_parameters.setdefault(id(parameter), device)
        if other != device:
            raise StrategyError(
                f"a parameter of shape {list(parameter.shape)} is used on the devices {other} and {device}; put the "
                "blocks that use it on one device"
            )

    def enter_module(self, name: str, module: torch.nn.Module, given: object) -> None:
        """Note that a module with buffers runs.

        Raises:
            StrategyError: if it does in two stages, whose micro-batches would change the buffers in another order.
        """
        watcher = _watcher.now
        if watcher is None:
            return
        stage = self._of_modules.setdefault(name, watcher.stage)
        if stage != watcher.stage:
            raise StrategyError(
                f"module {name} has buffers, and runs in the stages {stage} and {watcher.stage}, whose micro-batches "
                "would meet there out of order; put both blocks into one stage"
            )


class BufferUses(TorchFunctionMode):
    """A watcher of the buffers that operators of PyTorch are given, in the thread that enters it.

    Buffers that several stages use, and that change, are refused: micro-batches would meet there out of order.

    Args:
        stage: returns the stage in which the micro-batch is.
    """

    def __init__(self, module: torch.nn.Module, stage: Callable[[], int]) -> None:
        super().__init__()
        self._slots = slots_of(module)
        self._stage = stage
        self._stages: dict[str, set[int]] = {slot.name: set() for slot in self._slots}
        self._before = [_identity(slot) for slot in self._slots]

    def __torch_function__(
        self,
        function: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """See `TorchFunctionMode`."""
        given = {id(leaf) for leaf in jax.tree.leaves((args, kwargs))}
        for slot in self._slots:
            if id(slot.tensor) in given:
                self._stages[slot.name].add(self._stage())
        return function(*args, **(kwargs or {}))

    def refuse_changes_that_cross(self) -> None:
        """Refuse buffers that were used in several stages, and changed."""
        for slot, before in zip(self._slots, self._before, strict=True):
            stages = sorted(self._stages[slot.name])
            if len(stages) > 1 and _identity(slot) != before:
                raise StrategyError(
                    f"buffer {slot.name} is changed, and used in the stages {', '.join(map(str, stages))}, whose "
                    "micro-batches would meet there out of order; use it in the blocks of one stage"
                )


def _identity(slot: Slot) -> tuple[int, int]:
    """Return a value that is another one when a buffer has been changed."""
    return id(slot.tensor), slot.tensor._version
