"""PopTorch's operators and questions, as far as they mean something without an IPU."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Generic, NoReturn, ParamSpec, TypeVar

import torch

from popdist.switches import require_switches
from strategies.compat.poptorch.enums import MatMulSerializationMode, OverlapMode
from strategies.compat.poptorch.without_effect import NO_IPU, ONE_MEMORY, Accepted, Accepting, methods_of
from strategies.errors import StrategyError
from strategies.torch.threads import ThreadValue

Self = TypeVar("Self")
P = ParamSpec("P")
T = TypeVar("T")

_losses = ThreadValue[list[torch.Tensor] | None](None)


def identity_loss(x: torch.Tensor, reduction: str = "none") -> torch.Tensor:
    """Mark a tensor as the loss of a training model, reduced as is said.

    Args:
        x: any shape; a scalar where it is not reduced.
        reduction: "sum", "mean" or "none".
    """
    if reduction not in ("sum", "mean", "none"):
        raise ValueError(f"reduction is {reduction!r}; a loss is reduced by 'sum', 'mean' or 'none'")
    loss = x if reduction == "none" else x.sum() if reduction == "sum" else x.mean()
    if _losses.now is not None:
        _losses.now.append(loss)
    return loss


def losses_marked_by(function: Callable[[], T]) -> tuple[T, list[torch.Tensor]]:
    """Call a function, and return its result and the losses that it has marked in this thread."""
    marked: list[torch.Tensor] = []
    with _losses.being(marked):
        return function(), marked


def isRunningOnIpu() -> bool:
    """Whether the code runs in a model that an executor executes: True inside of `forward` then."""
    return _losses.now is not None


CLAIMED = "POPTORCH_IPU_HARDWARE_VERSION"
"""Version of IPUs that `ipuHardwareVersion` reports, such as 21, for programs that refuse to start without IPUs."""


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """Return whether `POPTORCH_IPU_HARDWARE_VERSION` claims that there is an IPU; none is needed."""
    return ipuHardwareVersion() > 0


def ipuHardwareVersion() -> int:
    """Return what `POPTORCH_IPU_HARDWARE_VERSION` claims; 0: there is none.

    Raises:
        ValueError: if that is no number.
    """
    claimed = os.environ.get(CLAIMED) or "0"
    if not claimed.isdecimal():
        raise ValueError(f"{CLAIMED} is {claimed!r}; it is a version of IPUs, such as 2 or 21")
    return int(claimed)


def setLogLevel(level: int | str) -> None:
    """Set the level of the log `strategies.torch`: "TRACE", "DEBUG", "INFO", "WARN", "ERR", "OFF", or 0 to 6 for these.

    Raises:
        ValueError: for another one.
    """
    levels = {"TRACE": 5, "DEBUG": 10, "INFO": 20, "WARN": 30, "ERR": 40, "CRITICAL": 50, "OFF": 100}
    name = [*levels][level] if isinstance(level, int) and 0 <= level < len(levels) else str(level)
    if name not in levels:
        raise ValueError(f"the log level is {level!r}; use one of {', '.join(levels)}")
    logging.getLogger("strategies.torch").setLevel(levels[name])


def nop(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor."""
    return tensor


def ipu_print_tensor(tensor: torch.Tensor, title: str = "", *_: object, **named: object) -> torch.Tensor:
    """Print a tensor where it is computed, and return it; what says how it is printed changes nothing."""
    print(f"{title}: {tensor.detach()}" if title else str(tensor.detach()))
    return tensor


def set_available_memory(tensor: torch.Tensor, available_memory_proportion: float) -> torch.Tensor:
    """Return the tensor; memory is that of the host."""
    return tensor


def serializedMatMul(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    mode: MatMulSerializationMode,
    factor: int = 0,
    keep_precision: bool = False,
) -> torch.Tensor:
    """Return the product of two matrices, computed at once in the memory of the host."""
    require_switches(keep_precision=keep_precision)
    return torch.matmul(lhs, rhs)


def dynamic_slice(tensor: torch.Tensor, dim: int, start: torch.Tensor, size: int, step: int) -> torch.Tensor:
    """Return a part of a tensor along an axis, from where another tensor says.

    Args:
        tensor: of which it is a part.
        dim: the axis.
        start: one integer.
        size: from there on, of which every `step`-th element is taken.
        step: see there.
    """
    return torch.narrow(tensor, dim, start.reshape(()), size).index_select(dim, torch.arange(0, size, step))


def dynamic_update(input: torch.Tensor, src: torch.Tensor, dim: int, start: torch.Tensor, size: int) -> torch.Tensor:
    """Return a copy of a tensor with a part along an axis from another tensor.

    Args:
        input: the tensor.
        src: the other one.
        dim: the axis.
        start: one integer: where the part begins.
        size: of the part.
    """
    first = int(start)
    return torch.slice_scatter(input, src, dim, first, first + size)


def set_overlap_for_input(input_tensors: T, mode: OverlapMode) -> T:
    """Return the tensors: no copy to a device could overlap with computing."""
    return input_tensors


def set_overlap_for_output(output_tensors: T, mode: OverlapMode) -> T:
    """Return the tensors; see `set_overlap_for_input`."""
    return output_tensors


def recomputationCheckpoint(*tensors: torch.Tensor) -> torch.Tensor | Sequence[torch.Tensor]:
    """Return the tensors, which are kept anyway; `torch.utils.checkpoint` recomputes what lies between."""
    return tensors[0] if len(tensors) == 1 else tensors


def for_loop(
    count: int,
    body: Callable[..., torch.Tensor | tuple[torch.Tensor, ...] | list[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Call `inputs = body(*inputs)` so many times, and return the last inputs."""
    values = list(inputs)
    for _ in range(count):
        made = body(*values)
        values = list(made) if isinstance(made, tuple | list) else [made]
    return values


def cond(
    condition: torch.Tensor,
    then_body: Callable[..., T],
    then_inps: Sequence[torch.Tensor],
    else_body: Callable[..., T],
    else_inps: Sequence[torch.Tensor],
) -> T:
    """Call one of two functions, by a tensor of one element, and return what it returns."""
    return then_body(*then_inps) if bool(condition) else else_body(*else_inps)


class _Scope:
    """A scope that changes nothing."""

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class NameScope(_Scope):
    """A scope with a name for the operators of a graph, which there is not here.

    Args:
        name: of the scope.
    """

    def __init__(self, name: str) -> None:
        self.name = name


class Attribute(_Scope):
    """A scope with attributes for the operators of a graph, which there is not here.

    Args:
        kwargs: the attributes.
    """

    def __init__(self, **kwargs: object) -> None:
        self.attributes = kwargs


class MultiConv(_Scope, Accepting):
    """Convolutions that an IPU would compute together; here they are computed one after another, as they are written.

    PopTorch's methods that plan the convolutions are accepted, and change nothing.
    """

    _methods = methods_of(
        "MultiConv",
        availableMemoryProportions=Accepted(lambda value: value, ONE_MEMORY),
        cycleBackOff=Accepted(lambda value: value, NO_IPU),
        enableConvDithering=Accepted(lambda value: value, NO_IPU),
        partialsTypes=Accepted(lambda value: value, "PyTorch chooses in what it adds up"),
        perConvReservedTiles=Accepted(lambda value: value, NO_IPU),
        planType=Accepted(lambda value: value, "convolutions are computed one after another"),
    )


class CPU(Generic[P, T]):
    """A function that an IPU would leave to the host: called where it stands, as everything else.

    Args:
        layer_to_call: the function, or module.
        ID: its name.
    """

    def __init__(self, layer_to_call: Callable[P, T], ID: str) -> None:
        self._layer = layer_to_call
        self.ID = ID

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> T:
        """Call the function."""
        return self._layer(*arguments, **named)


def _refused(name: str, way_out: str) -> Callable[..., NoReturn]:
    """Return a function of this name that raises StrategyError with what to use instead."""

    def refuse(*arguments: object, **named: object) -> NoReturn:
        raise StrategyError(way_out)

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Refused: {way_out}."
    return refuse


def _not_provided(name: str, instead: str) -> Callable[..., NoReturn]:
    return _refused(name, f"{name} is not provided, as nothing in it is distributed; use {instead}")


custom_op = _refused(
    "custom_op", "custom operators are codelets of IPUs; write a torch.autograd.Function in their place"
)
ctc_beam_search_decoder = _not_provided("ctc_beam_search_decoder", "torchaudio.models.decoder.ctc_decoder")
fps = _not_provided("fps", "torch_cluster.fps")
nearest = _not_provided("nearest", "torch_cluster.nearest")
