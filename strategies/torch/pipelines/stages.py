"""The stages of a pipeline: the blocks, parameters and buffers of a forward pass that belong to each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.overrides import TorchFunctionMode
from typing_extensions import override

import strategies.trees as trees
from strategies.errors import StrategyError
from strategies.pipelines.timetable import PipelineSchedule
from strategies.torch.replicas.module_parts import Slot, slots_of
from strategies.torch.tensors import ThreadValue


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


class BlockWatcher(Protocol):
    """A watcher of the blocks that a forward pass enters, called in the pass's thread.

    An error of a method ends the forward pass.

    Attributes:
        stage: The present stage of the forward pass.
    """

    stage: int

    def begin(self, name: str, ipu: int | None) -> None:
        """Handle a block that begins, inside another block or after it."""

    def end(self) -> None:
        """Handle the end of a `with` block; the block around it continues."""


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


_watcher = ThreadValue[BlockWatcher | None](None)
_next_block = ThreadValue(0)


@contextmanager
def watching(watcher: BlockWatcher) -> Iterator[None]:
    """Report the blocks of this thread to a watcher."""
    with _watcher.using(watcher), _next_block.using(0):
        yield


def number_from_zero() -> None:
    """Restart the numbering of blocks without a name at 0."""
    _next_block.now = 0


def begin_block(name: str | None, ipu: int | None) -> None:
    """Report a block that begins. Without a name it is named by its number among such blocks."""
    if (watcher := _watcher.now) is None:
        return
    if name is None:
        name, _next_block.now = str(_next_block.now), _next_block.now + 1
    watcher.begin(name, ipu)


def end_block() -> None:
    """Report the end of a `with` block."""
    if _watcher.now is not None:
        _watcher.now.end()


class DiscoveredStages:
    """The stages of a module that the micro-batches of a replica have met. Threads may share it."""

    def __init__(self, placing: StagePlacing) -> None:
        self._placing = placing
        self._devices: dict[int, int] = {}  # by stage
        self._of_parameters: dict[int, int] = {}  # the device that uses a parameter, by the parameter's id
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
        other = self._of_parameters.setdefault(id(parameter), device)
        if other != device:
            raise StrategyError(
                f"a parameter of shape {[*parameter.shape]} is used on the devices {other} and {device}; use it on one"
            )


class BufferUses(TorchFunctionMode):
    """A watcher of the buffers passed to PyTorch's operators, in the thread that enters it.

    If several stages use a buffer that changes, it is refused: micro-batches would change it out of order.

    Args:
        module: The module with the buffers.
        watcher: The watcher that knows the present stage of the micro-batch.
    """

    def __init__(self, module: torch.nn.Module, watcher: BlockWatcher) -> None:
        super().__init__()
        self._slots = slots_of(module)
        self._watcher = watcher
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
                self._stages[slot.name].add(self._watcher.stage)
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
