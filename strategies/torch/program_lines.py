"""A training on PyTorch as lines of text, which instances compare before the first step.

PyTorch does not trace: what a module computes is its Python code. So what is compared are the types and numbers of all
its parts, the shapes of parameters and buffers, the optimizer's numbers, and the code of the loss function.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType

import torch

from strategies.torch.optimizer_arrays import PARAMS
from strategies.torch.replica_groups import groups_of

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def lines_of_module(module: torch.nn.Module) -> list[str]:
    """One line for each module, parameter and buffer in it."""
    return list(_of_module(module))


def _of_module(module: torch.nn.Module) -> Iterator[str]:
    for name, inner in module.named_modules():
        attributes = {key: value for key, value in vars(inner).items() if _is_compared(inner, key, value)}
        numbers = ", ".join(f"{key}={value!r}" for key, value in sorted(attributes.items()))
        yield f"{name or 'the module'}: {type(inner).__qualname__}({inner.extra_repr()}) {numbers}"
    for name, parameter in module.named_parameters():
        groups = groups_of(parameter)
        shown = "" if groups is None else f" {groups}"
        trained = "" if parameter.requires_grad else " not trained"
        yield f"{name}: {parameter.dtype}{list(parameter.shape)}{trained}{shown}"
    for name, buffer in module.named_buffers():
        yield f"{name}: buffer {buffer.dtype}{list(buffer.shape)}"


def _is_compared(module: torch.nn.Module, name: str, value: object) -> bool:
    """Return whether an attribute belongs to the program; private ones of PyTorch may differ between processes."""
    is_private = name.startswith("_") and type(module).__module__.partition(".")[0] == "torch"
    return isinstance(value, _PLAIN) and not is_private and not name.startswith("_torch")


def lines_of_optimizer(optimizer: torch.optim.Optimizer) -> list[str]:
    """One line for its kind, and for each of its groups."""
    groups = [
        ", ".join(f"{name}={_shown(value)}" for name, value in sorted(group.items()) if name != PARAMS)
        + f" for {len(group[PARAMS])} parameters"
        for group in optimizer.param_groups
    ]
    return [type(optimizer).__qualname__, *groups]


def lines_of_function(function: object) -> list[str]:
    """Return the instructions of a function of Python, and the numbers that it closes over; of others the name."""
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType):
        return [str(getattr(function, "__qualname__", type(function).__qualname__))]
    closed = [cell.cell_contents for cell in function.__closure__ or () if _is_full(cell)]
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return [*_of_code(function.__code__), *(f"closes over {_shown(value)}" for value in (*closed, *defaults))]


def _of_code(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if isinstance(instruction.argval, CodeType):
            yield from _of_code(instruction.argval)
        else:
            yield f"{instruction.opname} {instruction.argrepr}"


def _is_full(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _shown(value: object) -> str:
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_shown, value))})"
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return str(value.item())
    return type(value).__qualname__
