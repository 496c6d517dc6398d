"""The parts of a module: slots of buffers and frozen parameters, parts that are replaced, compiled or scripted.

On a spare, the values of these parts and of the optimizer are hidden: only the active instances know them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, final

import torch
from torch._C._dynamo import eval_frame

from strategies.errors import SpareError, StrategyError
from strategies.torch.replicas.gradient_map import groups_of
from strategies.torch.tensors import have_other_bits, have_same_bits

_WRAPPED, _IN_PLACE = "dynamo_ctx", "_compiled_call_impl"
"""The attributes in which `torch.compile(module)` and `module.compile()` keep the compiled form."""


class Slot(NamedTuple):
    """The place of a tensor that a forward pass may change: a buffer, or a frozen parameter.

    Attributes:
        name: The tensor's name in `named_buffers` or `named_parameters`.
        holder: The dictionary that holds the tensor.
        key: The tensor's key in the dictionary.
        is_parameter: Whether the tensor is a frozen parameter.
    """

    name: str
    holder: dict[str, torch.Tensor | None]
    key: str
    is_parameter: bool = False

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that is there now."""
        tensor = self.holder[self.key]
        assert tensor is not None
        return tensor

    def copied(self, memory: torch.Tensor | None = None) -> torch.Tensor:
        """Return a copy of the tensor: the given one, if it has the same shape and dtype."""
        tensor = self.tensor.detach()
        if memory is None or memory.shape != tensor.shape or memory.dtype != tensor.dtype:
            return tensor.clone()
        return memory.copy_(tensor)

    def holding(self, tensor: torch.Tensor) -> Slot:
        """Return a slot outside of the module, with another tensor."""
        return self._replace(holder={self.key: tensor})

    def put(self, value: torch.Tensor) -> None:
        """Copy a value into the tensor, or into a new tensor if the shapes differ. Autograd must be off."""
        if (tensor := self.tensor).shape == value.shape:
            tensor.copy_(value)
        else:
            self.holder[self.key] = value.to(tensor.device, copy=True)


def slots_of(module: torch.nn.Module) -> list[Slot]:
    """Return the slots of a module's buffers, then of its frozen parameters, each once, in their order.

    Parameters with a row for each group of replicas are left out, because the replicas of a group share a row.
    """
    buffers = [Slot(*place) for place in _places(module, "_buffers")]
    parameters = [Slot(*place, True) for place in _places(module, "_parameters")]
    return buffers + [slot for slot in parameters if not slot.tensor.requires_grad and groups_of(slot.tensor) is None]


def _places(module: torch.nn.Module, attribute: str) -> Iterator[tuple[str, dict[str, torch.Tensor | None], str]]:
    seen: set[int] = set()
    for prefix, inner in module.named_modules():
        holder = getattr(inner, attribute)
        for key, tensor in holder.items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{prefix}.{key}".lstrip("."), holder, key


def difference(tensor: torch.Tensor, before: torch.Tensor, waits: bool) -> float | torch.Tensor:
    """Return whether a tensor differs in any bit from an earlier one of its shape: 0 or 1, or a boolean on the device.

    Args:
        tensor: The tensor.
        before: The earlier one.
        waits: Whether to wait for the device, and to return a number.

    Raises:
        StrategyError: If the dtypes differ.
    """
    if tensor.dtype != before.dtype:
        raise StrategyError(
            f"a buffer has become {tensor.dtype}{list(tensor.shape)}, but was {before.dtype}{list(before.shape)}; "
            "keep the dtype of a buffer, or cast it in the module before the training"
        )
    return float(not have_same_bits(tensor, before)) if waits else have_other_bits(tensor.detach(), before.detach())


class ModuleWatch:
    """A watcher of a module's parts that are added, removed or replaced, and of parameters with a new shape or dtype.

    Attributes:
        named: The module's parameters with their names, each once, at the last call of `look`.
        parameters: The same parameters.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self.look()

    def look(self) -> None:
        """Remember the parts that the module has now."""
        modules = list(self._module.modules())
        holders = [one for inner in modules for one in (inner._parameters, inner._modules)]
        buffers = [inner._buffers for inner in modules]
        self._empty = [one for one in (*holders, *buffers) if not len(one)]  # most are; these are soon looked at
        self._holders = [(one, _ids_of(one), list(one.values())) for one in holders if len(one)]
        self._buffers = [(one, _are_empty(one)) for one in buffers if len(one)]
        self.named = list(self._module.named_parameters())
        self.parameters = [one for _, one in self.named]
        self._kinds = self._kinds_now()

    @property
    def has_other_parts(self) -> bool:
        """Whether parameters, submodules or buffers are others than at the last call of `look`; full buffers may be."""
        are_same = not any(self._empty) and all(_ids_of(holder) == ids for holder, ids, _ in self._holders)
        return not are_same or any(_are_empty(buffers) != before for buffers, before in self._buffers)

    @property
    def is_swapped(self) -> bool:
        """Whether plain tensors stand in for parameters, as during `torch.func.functional_call`."""
        return any(not isinstance(one, torch.nn.Parameter) for one in self._module.parameters())

    @property
    def writes(self) -> int:
        """The number of writes to parameters that PyTorch has counted."""
        return sum(one._version for one in self.parameters)

    @property
    def has_other_kinds(self) -> bool:
        """Whether a parameter has another shape or dtype than at the last call of `look`."""
        return self._kinds != self._kinds_now()

    def _kinds_now(self) -> list[tuple[torch.Size, torch.dtype]]:
        return [(one.shape, one.dtype) for one in self.parameters]


def _ids_of(holder: Mapping[str, object]) -> tuple[list[str], list[int]]:
    return list(holder.keys()), list(map(id, holder.values()))


def _are_empty(buffers: Mapping[str, torch.Tensor | None]) -> dict[str, bool]:
    return {key: buffer is None for key, buffer in buffers.items()}


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether `torch.compile` has wrapped a module or a part of it, or `module.compile()` was called."""
    forms = (one for each in module.modules() for one in (vars(each).get(_WRAPPED), getattr(each, _IN_PLACE, None)))
    return any(one is not None for one in forms)


def check_not_compiled() -> None:
    """Raise if torch.compile runs this function: it would compile the exchange of gradients as well."""
    if callable(eval_frame.get_eval_frame_callback()):
        raise StrategyError(
            "torch.compile around a DistributedModel would compile the exchange of gradients as well; compile the "
            "module inside it: DistributedModel(torch.compile(module), strategy)"
        )


_OPTIMIZED = re.compile(r"prim::(DifferentiableGraph|\w*Group)")


def stop_profiling(module: torch.nn.Module) -> None:
    """Turn PyTorch's profiling executor off in this process, for all scripted and traced code.

    The executor computes other bits from the second call on. A program calls such code unequally often in different
    processes, for example if only instance 0 evaluates.

    Raises:
        StrategyError: If the executor has already optimized a part of the module.
    """
    torch._C._jit_set_profiling_mode(False)  # there is no public switch for all threads
    optimized = [name for name, one in module.named_modules() if _is_optimized(one)]
    if optimized:
        raise StrategyError(
            f"{optimized[0] or 'the module'} is scripted and was called before, or another module with the same code "
            "was, so PyTorch has optimized it, and its bits depend on the number of calls; make the Trainer or "
            "DistributedModel before the first call, or call the module inside torch.jit.optimized_execution(False)"
        )


def _is_optimized(module: torch.nn.Module) -> bool:
    """Return whether a module has code of the executor with other bits: own derivatives, or fused operations."""
    if not isinstance(module, torch.jit.ScriptModule):
        return False
    try:
        plans = module._c.get_debug_state().execution_plans
    except RuntimeError:  # "optimized_plan_ INTERNAL ASSERT FAILED": there is none
        return False
    return any(_OPTIMIZED.search(str(plan.graph)) for plan in plans.values())


# ---- the values on a spare

Wait = Callable[[], None]
"""Waits until this spare has become active. If it does not, the function raises `SpareError` or `SystemExit`."""

_ATTRIBUTES = (
    *("device", "dtype", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_sparse", "itemsize", "layout"),
    *("nbytes", "ndim", "requires_grad", "shape"),
)
_METHODS = (
    *("__len__", "dim", "element_size", "is_complex", "is_contiguous", "is_floating_point", "nelement"),
    *("numel", "requires_grad_", "size", "stride"),
)
_FACTS = frozenset(
    {
        *(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES),
        *(getattr(torch.Tensor, name).__set__ for name in ("requires_grad",)),
        *(getattr(torch.Tensor, name) for name in _METHODS),
    }
)
"""The functions of PyTorch that need no values."""


class _HiddenTensor:
    """The part of the class of a tensor without values; `training` is set in the class of each trainer's tensors."""

    training: HiddenValues

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        named: Mapping[str, object] | None = None,
    ) -> object:
        if function not in _FACTS:
            cls.training.wait_for_values()
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(named or {}))


class _HiddenOptimizer:
    """The part of the class of an optimizer whose state has no values; `training` is set as for tensors."""

    training: HiddenValues

    @property
    def state(self) -> object:
        """The state of the optimizer, after waiting for it."""
        self.training.wait_for_values()
        return vars(self)["state"]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: a spare has no gradients."""


@final
class HiddenValues:
    """The values of a module and its optimizer, which can be hidden and shown.

    While they are hidden, each use of a parameter, buffer, gradient or optimizer state waits for them. Shapes, dtypes,
    `requires_grad`, `zero_grad` and the hyperparameters of the optimizer can be used.

    Args:
        module: The module.
        optimizer: Its optimizer.

    Attributes:
        wait: The function that waits for them.
    """

    def __init__(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.module, self.optimizer = module, optimizer
        self.wait: Wait = lambda: None
        self._hidden: list[tuple[object, type]] = []  # tensors and the optimizer, with their classes

    @property
    def is_hidden(self) -> bool:
        """Whether the values are hidden."""
        return bool(self._hidden)

    def wait_for_values(self) -> None:
        """Wait until the values are there.

        Raises:
            SpareError: If they do not come.
        """
        self.wait()
        if self.is_hidden:
            raise SpareError(
                "the program reads or writes a tensor of the Trainer's module or optimizer, which a spare does not "
                "have before it becomes active; read them in strategy.on_chief, or use metrics"
            )

    def hide(self, wait: Wait) -> None:
        """Hide the values. The state of the optimizer is dropped.

        Args:
            wait: Function that waits for the values.

        Raises:
            SpareError: If a tensor has a class of which no class can be derived.
        """
        if self.is_hidden:
            return
        self.wait = wait
        for parameter in self.module.parameters():
            parameter.grad = None
        self.optimizer.state.clear()
        vars(self.optimizer)["_opt_called"] = True  # schedulers look for it, and would warn
        parts = {id(one): one for one in (*self.module.parameters(), *self.module.buffers(), self.optimizer)}
        classes: dict[type, type] = {}
        try:
            for one in parts.values():
                if (kind := type(one)) not in classes:
                    part = _HiddenTensor if issubclass(kind, torch.Tensor) else _HiddenOptimizer
                    classes[kind] = type(f"Hidden{kind.__name__}", (part, kind), {"training": self})
                one.__class__ = classes[kind]  # as PyTorch's lazy modules do
                self._hidden.append((one, kind))
        except TypeError as error:
            raise SpareError(
                f"a spare cannot hide the values of a {kind.__name__}: {error}; use torch.nn.Parameter and tensors"
            ) from error
        vars(self.module)["zero_grad"] = lambda set_to_none=True: None  # a spare has no gradients

    def show(self) -> None:
        """Show the tensors again, with the values that they had, or NaN after `forget`."""
        if not self.is_hidden:
            return
        for one, kind in self._hidden:
            one.__class__ = kind
        self._hidden = []
        vars(self.module).pop("zero_grad", None)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the values in this block."""
        was_hidden = self.is_hidden
        self.show()
        try:
            yield
        finally:
            if was_hidden:
                self.hide(self.wait)

    def forget(self) -> None:
        """Write NaN over the values, so that no view of the program shows old ones. They must be shown."""
        with torch.no_grad():
            for one in (*self.module.parameters(), *self.module.buffers()):
                if one.is_floating_point() or one.is_complex():
                    one.fill_(math.nan)
