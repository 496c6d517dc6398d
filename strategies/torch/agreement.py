"""Comparisons between instances: a training described by lines of text, and its settings by a small hash.

Instances compare the lines before the first step. PyTorch does not trace a module, so there is no program to compare.
The lines list the types and numbers of all parts of the module, and the shapes of parameters and buffers. They also
list the optimizer's numbers, and the code of the loss function.

Instances compare the hash in every step. Settings are values that a program may change between steps, to the same
values on all instances.
"""

from __future__ import annotations

import dis
import itertools
import json
import pickle
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import partial
from types import CellType, CodeType, FunctionType
from typing import TypeGuard, TypeVar

import numpy as np
import torch

from collectives import Communicator
from strategies.core.agreement import broadcast_bytes, broadcast_text, insist_on_same_bits
from strategies.core.journal import Recorded
from strategies.core.survival import collectively
from strategies.jax.replicas.replicas import Replicas
from strategies.torch.replicas.gradient_map import groups_of
from strategies.torch.replicas.guard import digests_of
from strategies.torch.tensors import HOST, host_array, real_view
from strategies.torch.updates import PARAMS

Order = Mapping[str, Sequence[str]]
"""The order of the parts of a module: the keys of each of its dictionaries."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))

_T = TypeVar("_T")
_WORDS = 64
"""Number of hashes. As squares are below 2**12, float32 sums of 4,096 replicas are exact, and so is a variance of 0."""
_DIFFERENT = 1e-4


def order_of(module: torch.nn.Module) -> Order:
    """Return the order of a module's parts."""
    return {name: list(holder) for name, holder in _holders(module)}


def put_in_order(module: torch.nn.Module, order: Order) -> None:
    """Give the parts of a module an order, where they have the same names. Modules of TorchScript stay as they are."""
    for name, holder in _holders(module):  # which goes on to the submodules in their new order
        wanted = order.get(name, ())
        if list(holder) != wanted and holder.keys() == set(wanted):
            for key in wanted:
                holder[key] = holder.pop(key)


def _holders(module: torch.nn.Module) -> Iterator[tuple[str, dict[str, object]]]:
    for prefix, inner in module.named_modules():
        holders: list[object] = [inner._parameters, inner._buffers, inner._modules]
        if isinstance(inner, torch.nn.ParameterDict):
            holders.append(inner._keys)
        for number, holder in enumerate(holders):
            if isinstance(holder, dict):
                yield f"{prefix}/{number}", holder


def broadcast_order(replicas: Replicas, order: Order, root: int = 0) -> Order:
    """Return the order of rank `root`. Collective."""
    text = broadcast_text(replicas.communicator, json.dumps(order), root, "order of the module's parts")
    received: Order = json.loads(text)
    return received


def gather_bytes(communicator: Communicator, data: bytes, name: str) -> list[bytes]:
    """Return the bytes of all ranks on every rank, in their order. Collective.

    Args:
        communicator: The communicator of all instances.
        data: The bytes of this rank, at least one.
        name: The name of the call in messages.
    """
    return [broadcast_bytes(communicator, data, root, name) for root in range(communicator.size)]


def broadcast_object(communicator: Communicator, value: _T, root: int, name: str) -> _T:
    """Return the object of the instance `root` on every instance. Collective.

    Args:
        communicator: The communicator of all instances.
        value: The object; only that of `root` is used, and returned there as it is.
        root: The rank of the instance.
        name: The name of the call in messages.
    """
    if communicator.size == 1:
        return value
    is_root = communicator.rank == root
    received = broadcast_bytes(communicator, pickle.dumps(value) if is_root else b"", root, name)
    found: _T = value if is_root else pickle.loads(received)  # noqa: S301 - the job's own connections carry it
    return found


def gather_objects(communicator: Communicator, value: _T, name: str) -> list[_T]:
    """Return the objects of all instances on every instance, in the order of the ranks. Collective.

    Args:
        communicator: The communicator of all instances.
        value: The object of this instance.
        name: The name of the call in messages.
    """
    if communicator.size == 1:
        return [value]
    gathered = gather_bytes(communicator, pickle.dumps(value), name)
    return [pickle.loads(one) for one in gathered]  # noqa: S301


def agree_on_order(replicas: Replicas, module: torch.nn.Module) -> None:
    """Give the parts of a module the order that they have on instance 0, which a set of names can change. Collective.

    If an instance is lost, the others repeat it.
    """
    own = order_of(module)
    recorded = Recorded[Order]("order of the parts of a module", lambda order: lambda: order, lambda order: order)
    share = partial(broadcast_order, replicas)
    put_in_order(module, collectively(replicas, lambda: share(own), share, lambda: own, recorded))


def lines_of_module(module: torch.nn.Module, of_steps: Container[tuple[int, str]] = ()) -> list[str]:
    """Return one line for each submodule, parameter and buffer of a module.

    Args:
        module: The module.
        of_steps: The attributes that steps assign, `Attributes.of_steps`. They are not compared.
    """
    lines = []
    for name, inner in module.named_modules():
        changing = {key for key in vars(inner) if (id(vars(inner)), key) in of_steps}
        own = [(key, one) for key, one in vars(inner).items() if key not in changing and _is_compared(inner, key, one)]
        numbers = ", ".join(f"{key}={value!r}" for key, value in sorted(own))
        shown = "" if changing else inner.extra_repr()  # it may contain them
        lines.append(f"{name or 'the module'}: {type(inner).__qualname__}({shown}) {numbers}")
    return lines + lines_of_tensors(module)


def lines_of_tensors(module: torch.nn.Module) -> list[str]:
    """Return one line for each parameter and buffer of a module."""
    lines = []
    for name, parameter in module.named_parameters():
        groups = groups_of(parameter)
        shown = "" if groups is None else f" {groups}"
        trained = "" if parameter.requires_grad else " not trained"
        lines.append(f"{name}: {parameter.dtype}{list(parameter.shape)}{trained}{shown}")
    return lines + [f"{name}: buffer {one.dtype}{list(one.shape)}" for name, one in module.named_buffers()]


def _is_compared(module: torch.nn.Module, name: str, value: object) -> bool:
    """Return whether an attribute belongs to the program; private ones of PyTorch may differ between processes."""
    is_private = name.startswith("_") and type(module).__module__.partition(".")[0] == "torch"
    return isinstance(value, _PLAIN) and not is_private and not name.startswith("_torch")


def lines_of_optimizer(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return one line for the optimizer's class, and one for each of its groups."""
    groups = [
        ", ".join(f"{name}={_shown(value)}" for name, value in sorted(group.items()) if name != PARAMS)
        + f" for {len(group[PARAMS])} parameters"
        for group in optimizer.param_groups
    ]
    return [type(optimizer).__qualname__, *groups]


def lines_of_function(function: object) -> list[str]:
    """Return a Python function's instructions and the numbers that it closes over; for another object, its name."""
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType):
        return [str(getattr(function, "__qualname__", type(function).__qualname__))]
    closed = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]  # not empty
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return [*_of_code(function.__code__), *(f"closes over {_shown(value)}" for value in (*closed, *defaults))]


def _of_code(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if isinstance(instruction.argval, CodeType):
            yield from _of_code(instruction.argval)
        else:
            yield f"{instruction.opname} {instruction.argrepr}"


def _shown(value: object) -> str:
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_shown, value))})"
    if _is_scalar(value):
        return str(value.item())
    return type(value).__qualname__


def compare_tensors(replicas: Replicas, named: Sequence[tuple[str, torch.Tensor]], step: int) -> None:
    """Compare the bits of tensors between instances. On a device, compare digests that it computes first. Collective.

    Args:
        replicas: The replicas of all instances.
        named: The tensors with their names, all on one device.
        step: The number of steps so far, for messages.

    Raises:
        DivergenceError: On all instances, if bits differ.
    """
    if replicas.num_instances == 1:
        return
    if any(tensor.device != HOST for _, tensor in named):
        digests = np.array(digests_of([tensor for _, tensor in named]), np.uint64)
        gathered = replicas.communicator.all_gather(digests, name="digests of the state on the device")
        if (gathered == gathered[0]).all():
            return
    insist_on_same_bits(replicas, {name: host_array(real_view(tensor)) for name, tensor in named}, step)


SETTINGS_CHANGED = "a replica has changed the optimizer's settings, as scheduler.step() does; change them between steps"


class StepSettings:
    """The settings of a training: `requires_grad`, and the numbers and members of the optimizer's groups."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._seen: list[object] = []
        self._hash = 0

    def settings_hash(self, step: int, parameters: Sequence[torch.Tensor]) -> int:
        """Hash the settings to a number from 0 to 63, which depends on the step.

        Two different settings have equal hashes in one of 64 steps, so a difference is found at once or a few steps
        later.
        """
        seen: list[object] = [one.requires_grad for one in parameters]
        for group in self._optimizer.param_groups:
            seen += map(id, group[PARAMS])
            seen += [float(one) if _is_scalar(one) else one for name, one in group.items() if name != PARAMS]
        if seen != self._seen:
            self._seen, self._hash = seen, self._hashed(parameters)
        return hash_at_step(step, self._hash)

    def _hashed(self, parameters: Sequence[torch.Tensor]) -> int:
        places = {id(one): place for place, one in enumerate(parameters)}
        groups = (
            (
                tuple(_number(value) for name, value in group.items() if name != PARAMS),
                tuple(places.get(id(one), -1) for one in group[PARAMS]),
            )
            for group in self._optimizer.param_groups
        )
        return hash((tuple(one.requires_grad for one in parameters), *groups))


def hash_at_step(step: int, number: int) -> int:
    """Hash `number` to a number from 0 to 63. In one of 64 steps two different numbers have the same hash."""
    return hash((step, number)) % _WORDS


def settings_in_words(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, wholes: Sequence[torch.Tensor]
) -> tuple[dict[str, str], dict[str, Sequence[str]]]:
    """Return the settings by name, in words, and the members of the optimizer's groups, for an error message."""
    found = {name: "trained" if one.requires_grad else "frozen" for name, one in module.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        values = {name: _number(value) for name, value in group.items() if name != PARAMS}
        found |= {f"{name} of optimizer group {number}": f"= {value}" for name, value in values.items()}
    return found, members_of_groups(module, optimizer, wholes)


def members_of_groups(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, wholes: Sequence[torch.Tensor]
) -> dict[str, Sequence[str]]:
    """Return the names of the parameters in each group, in the order in which the optimizer numbers their state.

    Args:
        module: The module.
        optimizer: Its optimizer.
        wholes: The whole parameters, `TorchUpdate.wholes`.
    """
    names = {id(one): name for name, one in module.named_parameters()}
    members = iter([names.get(id(one), "another") for one in wholes])
    groups = enumerate(optimizer.param_groups)
    return {
        f"the parameters of optimizer group {number}": list(itertools.islice(members, len(group[PARAMS])))
        for number, group in groups
    }


def settings_differ(mean_hash: float, mean_square: float) -> bool:
    """Return whether the replicas' hashes of the settings differ: whether the variance is above zero.

    Args:
        mean_hash: The mean of the hashes over all replicas.
        mean_square: The mean of the squares of the hashes.
    """
    return mean_square - mean_hash * mean_hash > _DIFFERENT


def _number(value: object) -> object:
    """Return a value with the same hash in every process; 0 for strings, None and NaN, whose hashes differ."""
    if isinstance(value, bool | int | float) and value == value:
        return value
    if isinstance(value, tuple | list):
        return tuple(map(_number, value))
    return float(value) if _is_scalar(value) else 0


def _is_scalar(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.numel() == 1
