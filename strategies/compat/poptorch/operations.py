"""PopTorch's operators, queries and automatic casts that have a meaning without an IPU."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ContextDecorator, ExitStack
from typing import Generic, NoReturn, ParamSpec, TypeVar

import torch

from popdist.switches import require_switches
from strategies.compat.poptorch.names import (
    NO_IPU,
    ONE_MEMORY,
    Accepting,
    MatMulSerializationMode,
    OverlapMode,
    Rows,
    TableRow,
)
from strategies.errors import StrategyError
from strategies.torch.tensors import ThreadValue

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., object])

_is_heeded = ThreadValue(True)
_losses = ThreadValue[list[torch.Tensor] | None](None)


# ---- automatic casts


class Policy:
    """PopTorch's lists of operators by the dtypes that compute them.

    Args:
        fp16: Operators computed in float16.
        fp32: Operators computed in float32.
        promote: Operators whose arguments are cast to the widest of their dtypes.
        demote: Operators whose arguments are cast to the narrowest of their dtypes.

    Attributes:
        lists: Non-empty lists by their names.
    """

    def __init__(
        self,
        fp16: Iterable[str] = (),
        fp32: Iterable[str] = (),
        promote: Iterable[str] = (),
        demote: Iterable[str] = (),
    ) -> None:
        given = {"fp16": fp16, "fp32": fp32, "promote": promote, "demote": demote}
        self.lists: Mapping[str, list[str]] = {name: list(names) for name, names in given.items() if names}


class autocast(ContextDecorator):
    """A context or decorator that computes matrix products and convolutions in 16 bits, like `torch.autocast("cpu")`.

    Args:
        enabled: False switches the casts off.
        dtype: `torch.float16`, as on IPUs, or `torch.bfloat16`, which needs no loss scaling.

    Raises:
        TypeError: If `enabled` is not True or False.

    Example::

        with poptorch.autocast():
            hidden = torch.nn.functional.linear(rows, weights)  # float16
    """

    def __init__(self, enabled: bool = True, dtype: torch.dtype = torch.float16) -> None:
        require_switches(enabled=enabled)
        self._enabled, self._dtype = enabled, dtype
        self._entered: list[ExitStack] = []

    def _recreate_cm(self) -> autocast:  # each call of a decorated function needs its own
        return type(self)(self._enabled, self._dtype)

    def __enter__(self) -> autocast:
        inner = ExitStack()
        inner.enter_context(torch.autocast("cpu", self._dtype, enabled=self._enabled and _is_heeded.now))
        self._entered.append(inner)
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.pop().close()


def heeded_by(function: F, is_heeded: bool) -> F:
    """Return a function that enables or disables `autocast` in its thread, for `Options.Precision.autocastEnabled`."""
    return function if is_heeded else _is_heeded.using(False)(function)


# ---- operators and queries


def identity_loss(x: torch.Tensor, reduction: str = "none") -> torch.Tensor:
    """Mark a tensor as the loss of a training model, after an optional reduction.

    Args:
        x: Tensor of any shape; a scalar if `reduction` is "none".
        reduction: "sum", "mean" or "none".

    Example::

        loss = poptorch.identity_loss((outputs - targets) ** 2, reduction="mean")
    """
    if reduction not in ("sum", "mean", "none"):
        raise ValueError(f"reduction is {reduction!r}; use 'sum', 'mean' or 'none'")
    loss = x if reduction == "none" else x.sum() if reduction == "sum" else x.mean()
    if _losses.now is not None:
        _losses.now.append(loss)
    return loss


def losses_marked_by(function: Callable[[], T]) -> tuple[T, list[torch.Tensor]]:
    """Call a function; return its result and the losses that it marked in this thread."""
    marked: list[torch.Tensor] = []
    with _losses.using(marked):
        return function(), marked


def isRunningOnIpu() -> bool:
    """Return whether an executor runs this code: True inside `forward` of its model."""
    return _losses.now is not None


CLAIMED = "POPTORCH_IPU_HARDWARE_VERSION"
"""Version of IPUs that `ipuHardwareVersion` reports, such as 21, for programs that refuse to start without IPUs."""


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """Return whether `POPTORCH_IPU_HARDWARE_VERSION` claims an IPU; models do not need one."""
    return ipuHardwareVersion() > 0


def ipuHardwareVersion() -> int:
    """Return the version that `POPTORCH_IPU_HARDWARE_VERSION` claims, or 0.

    Raises:
        ValueError: If the variable is not a number.
    """
    claimed = os.environ.get(CLAIMED) or "0"
    if not claimed.isdecimal():
        raise ValueError(f"{CLAIMED} is {claimed!r}; set it to a version of IPUs, such as 2 or 21")
    return int(claimed)


def setLogLevel(level: int | str) -> None:
    """Set the level of the log `strategies.torch` by name, or by number 0 to 6 in this order.

    Args:
        level: "TRACE", "DEBUG", "INFO", "WARN", "ERR", "CRITICAL" or "OFF", or its number.

    Raises:
        ValueError: For another level.
    """
    levels = {"TRACE": 5, "DEBUG": 10, "INFO": 20, "WARN": 30, "ERR": 40, "CRITICAL": 50, "OFF": 100}
    name = [*levels][level] if isinstance(level, int) and 0 <= level < len(levels) else str(level)
    if name not in levels:
        raise ValueError(f"the log level is {level!r}; use one of {', '.join(levels)}")
    logging.getLogger("strategies.torch").setLevel(levels[name])


def nop(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor unchanged."""
    return tensor


def ipu_print_tensor(tensor: torch.Tensor, title: str = "", *_: object, **named: object) -> torch.Tensor:
    """Print a tensor when it is computed, and return it; PopTorch's arguments for the format have no effect."""
    print(f"{title}: {tensor.detach()}" if title else str(tensor.detach()))
    return tensor


def set_available_memory(tensor: torch.Tensor, available_memory_proportion: float) -> torch.Tensor:
    """Return the tensor unchanged; all tensors are in host memory."""
    return tensor


def serializedMatMul(
    lhs: torch.Tensor, rhs: torch.Tensor, mode: MatMulSerializationMode, factor: int = 0, keep_precision: bool = False
) -> torch.Tensor:
    """Return the product of two matrices, computed at once in host memory."""
    require_switches(keep_precision=keep_precision)
    return torch.matmul(lhs, rhs)


def dynamic_slice(tensor: torch.Tensor, dim: int, start: torch.Tensor, size: int, step: int) -> torch.Tensor:
    """Return a part of a tensor along an axis, at a position given by another tensor.

    Args:
        tensor: Tensor of any shape.
        dim: Axis.
        start: First index, a tensor of one integer.
        size: Length of the part, before `step`.
        step: Distance between the elements taken.
    """
    return torch.narrow(tensor, dim, start.reshape(()), size).index_select(dim, torch.arange(0, size, step))


def dynamic_update(input: torch.Tensor, src: torch.Tensor, dim: int, start: torch.Tensor, size: int) -> torch.Tensor:
    """Return a copy of a tensor whose part along an axis is replaced by another tensor.

    Args:
        input: Tensor to copy.
        src: Tensor that replaces the part.
        dim: Axis.
        start: First index of the part, a tensor of one integer.
        size: Length of the part.
    """
    first = int(start)
    return torch.slice_scatter(input, src, dim, first, first + size)


def set_overlap_for_input(input_tensors: T, mode: OverlapMode) -> T:
    """Return the tensors unchanged, because no copy to a device could overlap with computing."""
    return input_tensors


def set_overlap_for_output(output_tensors: T, mode: OverlapMode) -> T:
    """Return the tensors unchanged, because no copy from a device could overlap with computing."""
    return output_tensors


def recomputationCheckpoint(*tensors: torch.Tensor) -> torch.Tensor | Sequence[torch.Tensor]:
    """Return the tensors unchanged, because they are kept; use `torch.utils.checkpoint` to recompute a part."""
    return tensors[0] if len(tensors) == 1 else tensors


def for_loop(
    count: int,
    body: Callable[..., torch.Tensor | tuple[torch.Tensor, ...] | list[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Repeat `inputs = body(*inputs)` `count` times, and return the last inputs."""
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
    """Return the result of one of two functions, chosen by a tensor of one element."""
    return then_body(*then_inps) if bool(condition) else else_body(*else_inps)


class _Scope(AbstractContextManager["_Scope"]):
    """A scope without an effect."""

    def __exit__(self, *error: object) -> None:
        pass


class NameScope(_Scope):
    """A scope with a name for operators of a graph. No effect, because there is no graph.

    Args:
        name: Name of the scope.
    """

    def __init__(self, name: str) -> None:
        self.name = name


class Attribute(_Scope):
    """A scope with attributes for operators of a graph. No effect, because there is no graph.

    Args:
        kwargs: Attributes by name.
    """

    def __init__(self, **kwargs: object) -> None:
        self.attributes = kwargs


class MultiConv(_Scope, Accepting):
    """A scope of convolutions that an IPU would compute together; here they are computed one after another.

    PopTorch's methods that plan the convolutions are accepted and have no effect.
    """

    _rows: Rows = {
        "availableMemoryProportions": TableRow("value", ONE_MEMORY),
        "cycleBackOff": TableRow("value", NO_IPU),
        "enableConvDithering": TableRow("value", NO_IPU),
        "partialsTypes": TableRow("value", "PyTorch chooses the dtype of partial sums"),
        "perConvReservedTiles": TableRow("value", NO_IPU),
        "planType": TableRow("value", "convolutions are computed one after another"),
    }


class CPU(Generic[P, T]):
    """A function that an IPU would leave to the host; here a call runs it in place, like any other.

    Args:
        layer_to_call: Function, or module.
        ID: Its name.
    """

    def __init__(self, layer_to_call: Callable[P, T], ID: str) -> None:
        self._layer = layer_to_call
        self.ID = ID

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> T:
        """Call the function and return its result."""
        return self._layer(*arguments, **named)


def _refused(name: str, way_out: str) -> Callable[..., NoReturn]:
    """Return a function of this name that raises a StrategyError with the way out."""

    def refuse(*arguments: object, **named: object) -> NoReturn:
        raise StrategyError(way_out)

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Refused: {way_out}."
    return refuse


_NOT_PROVIDED = "is not provided, because it has nothing to distribute; use"

custom_op = _refused("custom_op", "custom operators are codelets of IPUs; write a torch.autograd.Function instead")
ctc_beam_search_decoder = _refused(
    "ctc_beam_search_decoder", f"ctc_beam_search_decoder {_NOT_PROVIDED} torchaudio.models.decoder.ctc_decoder"
)
fps = _refused("fps", f"fps {_NOT_PROVIDED} torch_cluster.fps")
load = _refused(
    "load",
    "files of whole models are not read; make the model as the program that saved it does, and load its state_dict, or "
    "restore the training with strategies.Checkpoints(folder, training.trainer)",
)
nearest = _refused("nearest", f"nearest {_NOT_PROVIDED} torch_cluster.nearest")
