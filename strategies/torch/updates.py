"""PyTorch's optimizers: their update, once per instance, with the mean gradients, their state as arrays, and layers."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import final

import numpy as np
import torch
import torch.optim.optimizer as of_torch

from popdist.records.distribution_settings import LEARNING_RATE
from strategies.core.metrics import Layers, layer_names
from strategies.errors import StrategyError
from strategies.exchange.choice import DevicePath
from strategies.exchange.flat import ShardedArrays, Shards
from strategies.jax.replicas.replicas import Replicas
from strategies.jax.replicas.variables import PartOfArray, shards_of
from strategies.torch.replicas.gradient_map import groups_of
from strategies.torch.tensors import HOST, as_tensor, complex_view, dtype_of, host_array, real_view, torch_dtype
from strategies.trees import ShapeOfArray
from strategies.typing import Leaf, Number, Tree

STATE, GROUPS, PARAMS = "state", "param_groups", "params"
_LR, _NAME = "lr", "name"
_NUMBERS = (bool, int, float)

ArraysByName = dict[str, np.ndarray]
"""The state of an optimizer for one parameter."""

ELEMENTWISE = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
"""Optimizers of `torch.optim` that compute each element from the same element of gradient, state and parameter."""
_WITHOUT_CLIPPING = ("torch.", "strategies.")
"""Modules whose hooks of all optimizers count steps or raise errors."""


@final
class TorchUpdate:
    """The update of parameters in place, from mean gradients, with whole or sharded optimizer state.

    Sharded state is like stage 1 of ZeRO (Rajbhandari et al., 2020): an instance with r of R replicas keeps r/R of the
    optimizer state, and updates that part of the parameters. Then instances gather the new parameters. The optimizer
    gets this instance's shards as parameters: flat views of the whole parameters.

    The engine asks for `shards` when it plans the exchange, and calls `apply` once per step, on all instances. If
    `apply` raises, parameters and optimizer state may have changed in part; the error is final.

    Args:
        replicas: The replicas of all instances.
        optimizer: The optimizer of all parameters. From here on it holds the shards, if the state is sharded.
        min_elements: The state of smaller parameters stays whole on every instance; None to shard no state.

    Attributes:
        is_sharded: Whether the optimizer state is sharded.
        path: The path of gradients that stay on a device; None if the host exchanges them.

    Raises:
        StrategyError: If the state is to be sharded, but the optimizer is not known to be elementwise, or has a state
            or step hooks already.
    """

    def __init__(self, replicas: Replicas, optimizer: torch.optim.Optimizer, min_elements: int | None = None) -> None:
        self._replicas, self._optimizer = replicas, optimizer
        self.is_sharded = min_elements is not None
        self.path: DevicePath | None = None
        self._shards = shards_of(replicas, min_elements or 0)
        self._parts: dict[int, torch.nn.Parameter] = {}  # the shard of each sharded parameter, by its id
        self._memory: dict[int, int] = {}  # the address of each sharded whole parameter, by its id
        self._wholes = parameters_of(optimizer)  # in the order of the optimizer
        if self.is_sharded:
            check_elementwise(optimizer)
            _check_no_step_hooks(optimizer)
            if optimizer.state:
                raise StrategyError("the optimizer has already made steps; give a new one, whose state can be sharded")
            for group in optimizer.param_groups:
                group[PARAMS] = [self._part_of(parameter) for parameter in group[PARAMS]]
            self._numbered = list(map(id, parameters_of(optimizer)))
            shapes = [ShapeOfArray(tuple(one.shape), dtype_of(one)) for one in self._wholes]
            self._gathered = ShardedArrays(self._shards, shapes, "parts of parameters")

    @property
    def shards(self) -> Shards | None:
        """The cut of mean gradients into shards, one per instance; None if every instance gets whole means.

        Means are whole if the state is, or if the transport cannot scatter reductions.
        """
        return self._shards if self.is_sharded and self._replicas.communicator.scatters_reductions else None

    @property
    def wholes(self) -> Sequence[torch.nn.Parameter]:
        """The whole parameters, in the order in which the optimizer numbers their state."""
        return self._wholes if self.is_sharded else parameters_of(self._optimizer)

    def whole(self, number: int, array: np.ndarray) -> np.ndarray | PartOfArray:
        """Return an array of a parameter's state, as a `PartOfArray` if this instance has only a part of it.

        Args:
            number: The number of the parameter in the optimizer.
            array: The array on this instance.
        """
        if not self.is_sharded or not array.ndim or not self._shards.divides(whole := self._wholes[number]):
            return array
        shape = ShapeOfArray(tuple(whole.shape), array.dtype)
        return PartOfArray(self._shards.padded(array, whole), shape, self._shards, self._replicas)

    def apply(self, means: Sequence[tuple[torch.nn.Parameter, torch.Tensor | None]]) -> None:
        """Update the parameters that have a mean gradient; others stay as they are, as with PyTorch's optimizers.

        Collective if the state is sharded: instances then gather the parameters.

        Args:
            means: Each trained parameter with its mean gradient, whole or as this instance's flat shard; None without
                one.
        """
        if self.is_sharded:
            self._begin()
        for parameter, mean in means:
            if (part := self._parts.get(id(parameter))) is None or mean is None:
                parameter.grad = mean
            elif mean.numel() == parameter.numel():
                part.grad = mean.reshape(-1)[self._bounds(parameter)]
            else:
                part.grad = mean.reshape(-1)[: part.numel()]
        # The gradients of other parameters would not be means.
        _check_no_others(self._optimizer, [self._parts.get(id(one), one) for one, _ in means], only_used=True)
        self._optimizer.step()
        if self._parts and self._replicas.num_instances > 1:
            self._gather()

    def _begin(self) -> None:
        """Follow the program's changes, and drop the gradients of the last step, of frozen parameters too."""
        _check_no_step_hooks(self._optimizer)
        if list(map(id, parameters_of(self._optimizer))) != self._numbered:
            raise StrategyError(
                "the optimizer's groups have other parameters than when the Trainer was made, but its state is sharded "
                "by those; make another optimizer and Trainer, or use replicated_optimizer_state_sharding=False"
            )
        for parameter in self._wholes:
            part = self._parts.get(id(parameter), parameter)
            part.grad = None
            if part is not parameter and self._memory[id(parameter)] != parameter.data_ptr():
                self._memory[id(parameter)] = parameter.data_ptr()
                part.data = self._view(parameter)

    def _part_of(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        if not self._shards.divides(real_view(parameter.detach())):
            return parameter
        part = torch.nn.Parameter(self._view(parameter), parameter.requires_grad)
        self._parts[id(parameter)], self._memory[id(parameter)] = part, parameter.data_ptr()
        return part

    def _view(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        if not parameter.is_contiguous() or parameter.is_complex():
            raise StrategyError(
                f"a parameter of shape {list(parameter.shape)} is complex or not contiguous in memory, so its state "
                "cannot be sharded; make it contiguous and real, or use replicated_optimizer_state_sharding=False"
            )
        return parameter.detach().view(-1)[self._bounds(parameter)]

    def _bounds(self, parameter: torch.nn.Parameter) -> slice:
        return self._shards.bounds(parameter, self._replicas.local_replicas.start)

    def _gather(self) -> None:
        """Gather the shards of all instances into the memory of the parameters."""
        with torch.no_grad():
            for number, members in self._gathered.members.items():
                buffer = self._gathered.layout.buffers[number]
                places = list(zip([self._wholes[one] for one in members], buffer.starts, strict=True))
                device = places[0][0].device
                own = torch.zeros(buffer.size, dtype=torch_dtype(buffer.dtype), device=device)
                for parameter, start in places:
                    part = self._parts[id(parameter)]
                    own[start : start + part.numel()].copy_(part)
                if self.path is not None:
                    gathered = self.path.gather(f"parts of parameters/{number}", own)
                else:
                    gathered = as_tensor(self._gathered.gather(number, host_array(own), self._replicas.communicator))
                for parameter, start in places:
                    self._put(parameter, gathered[:, start:])

    def _put(self, parameter: torch.nn.Parameter, gathered: torch.Tensor) -> None:
        """Copy the shards of other instances into a parameter."""
        flat = parameter.detach().view(-1)
        for rank, row in enumerate(gathered):
            bounds = self._shards.bounds(parameter, rank * self._shards.local)
            count = bounds.stop - bounds.start
            if rank != self._replicas.instance_index and count:
                flat[bounds].copy_(row[:count])


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is known to be elementwise, see `ELEMENTWISE`."""
    kind = type(optimizer)
    is_known = kind.__module__.startswith("torch.optim") and kind.__name__ in ELEMENTWISE
    return is_known or bool(getattr(optimizer, "is_elementwise", False))


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raise unless an optimizer is known to compute element by element.

    Raises:
        StrategyError: If the optimizer is not one of `ELEMENTWISE`, and its class lacks `is_elementwise = True`. Or if
            the optimizer has a fused kernel, which on CPUs rounds the last elements of an array differently.
    """
    kind = type(optimizer)
    if any(group.get("fused") for group in optimizer.param_groups):
        raise StrategyError(
            f"the optimizer state cannot be sharded: {kind.__name__} has fused=True, whose kernel rounds elements at "
            "the end of an array differently, and the ends of shards depend on the number of instances; use "
            "fused=False, or replicated_optimizer_state_sharding=False"
        )
    if not is_elementwise(optimizer):
        raise StrategyError(
            f"the optimizer state cannot be sharded: {kind.__name__} is not known to compute every element by itself; "
            f"use one of {', '.join(ELEMENTWISE)}, give the class an attribute is_elementwise = True if it does, or "
            "use replicated_optimizer_state_sharding=False"
        )


def _check_no_step_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Raise if a function of the program runs before or after the optimizer's steps.

    Raises:
        StrategyError: If there is one.
    """
    of_all = [*of_torch._global_optimizer_pre_hooks.values(), *of_torch._global_optimizer_post_hooks.values()]
    hooks = [
        *optimizer._optimizer_step_pre_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
        *(
            one
            for one in of_all
            if not str(getattr(getattr(one, "func", one), "__module__", "")).startswith(_WITHOUT_CLIPPING)
        ),
    ]
    if hooks:
        raise StrategyError(
            f"the step hook {getattr(hooks[0], '__qualname__', hooks[0])} of the optimizer would see parts of "
            "gradients and parameters, because the optimizer state is sharded; remove the hook, or use "
            "replicated_optimizer_state_sharding=False"
        )


def check_groups_supported(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise if the optimizer would mix the rows of groups of replicas."""
    grouped = [name for name, parameter in module.named_parameters() if groups_of(parameter) is not None]
    if grouped and not is_elementwise(optimizer):
        raise StrategyError(
            f"{grouped[0]} has a row for each group of replicas, but {type(optimizer).__name__} is not known to "
            f"compute every element by itself; use one of {', '.join(ELEMENTWISE)}, or give the class an attribute "
            "is_elementwise = True if it does"
        )


def _check_no_others(optimizer: torch.optim.Optimizer, own: Iterable[torch.Tensor], only_used: bool) -> None:
    """Raise if an optimizer has parameters beside its own ones; with `only_used` only if they have gradients."""
    known = set(map(id, own))
    others = [one for one in parameters_of(optimizer) if id(one) not in known and not (only_used and one.grad is None)]
    if others:
        raise ValueError(
            f"the optimizer has {len(others)} parameters that do not belong to the module, the first of shape "
            f"{list(others[0].shape)}; make it with module.parameters()"
        )


def check_module_optimizer(optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> None:
    """Raise if an optimizer cannot update a module.

    Raises:
        TypeError: If the object is no optimizer.
        StrategyError: If the optimizer computes the loss itself.
        ValueError: If the optimizer has parameters that are not the module's.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"the optimizer is a {type(optimizer).__name__}; give an instance of a class of torch.optim")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise StrategyError("LBFGS computes the loss several times in a step; use an optimizer that takes gradients")
    _check_no_others(optimizer, module.parameters(), only_used=False)


# ---- the state as arrays


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return the parameters of an optimizer, in the order of the numbers in its `state_dict`."""
    return [parameter for group in optimizer.param_groups for parameter in group[PARAMS]]


def numbers_of_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Tree]]:
    """Return the hyperparameters of each group as arrays of no axes, tuples as lists, without None and strings.

    `params` holds the numbers of the group's parameters, as in a `state_dict`.
    """
    found, first = [], 0
    for group in optimizer.param_groups:
        named = {name: _as_number(value) for name, value in group.items() if name != PARAMS}
        numbers = {name: value for name, value in named.items() if value is not None}
        begin, first = first, first + len(group[PARAMS])
        found.append({**numbers, PARAMS: np.arange(begin, first, dtype=np.int64)})
    return found


def set_numbers(optimizer: torch.optim.Optimizer, groups: Tree) -> None:
    """Restore the hyperparameters that `numbers_of_groups` has returned."""
    for group, numbers in zip(optimizer.param_groups, groups, strict=True):
        for name, value in numbers.items():
            if isinstance(group.get(name), torch.Tensor):
                group[name].copy_(as_tensor(np.asarray(value)))
            elif name != PARAMS:
                group[name] = plain_number(value)


def state_of(optimizer: torch.optim.Optimizer, wanted: Collection[int] = ()) -> dict[int, ArraysByName]:
    """Return the arrays of each parameter's state, by the parameter's number. Tensors on the host are not copied.

    Args:
        optimizer: The optimizer.
        wanted: The numbers of parameters that get a state of the right form if the optimizer has none for them yet.

    Raises:
        StrategyError: If the state holds other values than tensors, numbers and None.
    """
    found: dict[int, ArraysByName] = {}
    for number, state in _states_of(optimizer, wanted).items():
        found[number] = {}
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                found[number][name] = host_array(real_view(value))
            elif isinstance(value, _NUMBERS):
                found[number][name] = np.asarray(value)
            elif value is not None:
                raise StrategyError(
                    f"{type(optimizer).__name__} keeps a {type(value).__name__} ({name}) for parameter {number}; only "
                    "tensors and numbers can be saved and sent to other instances"
                )
    return found


def _states_of(optimizer: torch.optim.Optimizer, wanted: Collection[int]) -> dict[int, Mapping[str, object]]:
    numbered = enumerate(parameters_of(optimizer))
    found = {number: optimizer.state[parameter] for number, parameter in numbered if parameter in optimizer.state}
    if set(wanted) - found.keys():
        found = {**_states_of(_after_one_step(optimizer, wanted), ()), **found}
    return found


def set_state(optimizer: torch.optim.Optimizer, arrays: Mapping[int, ArraysByName]) -> None:
    """Restore a state from copies of arrays. The optimizer's state for other parameters is dropped.

    Each value becomes a tensor, a number or None: whichever the optimizer has in its place, now or after a step.

    Args:
        optimizer: The optimizer to change.
        arrays: Arrays as `state_of` returns them.
    """
    parameters, like = parameters_of(optimizer), _states_of(optimizer, arrays.keys())
    optimizer.state.clear()
    for number, of_parameter in arrays.items():
        parameter, before = parameters[number], like.pop(number)
        values = {name: _restored(array, before[name], parameter) for name, array in of_parameter.items()}
        optimizer.state[parameter] = values | {name: None for name, value in before.items() if value is None}


def _restored(array: np.ndarray, before: object, parameter: torch.nn.Parameter) -> object:
    """Return an array as a tensor on the device of `before`, or as a number of its kind; None in place of None."""
    if not isinstance(before, torch.Tensor):
        return None if before is None else type(before)(np.asarray(array).item())  # type: ignore[call-arg]
    value = as_tensor(np.array(array)).to(before.device)
    return complex_view(value) if parameter.is_complex() and value.shape == (*parameter.shape, 2) else value


def _after_one_step(optimizer: torch.optim.Optimizer, wanted: Collection[int]) -> torch.optim.Optimizer:
    """Return a copy of the optimizer that has made a step with gradients of zero, on other parameters.

    PyTorch's optimizers create their state in the first step, so the copy shows the form of the state.

    Args:
        optimizer: The optimizer.
        wanted: The numbers of the parameters for which the copy is to have a state.
    """
    numbered = enumerate(parameters_of(optimizer))
    others = {id(one): torch.nn.Parameter(torch.zeros_like(one), number in wanted) for number, one in numbered}
    groups = [{**group, PARAMS: [others[id(one)] for one in group[PARAMS]]} for group in optimizer.param_groups]
    clone = copy.copy(optimizer)
    clone.__dict__ = {**optimizer.__dict__, "param_groups": groups, "state": type(optimizer.state)(dict)}
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        clone.__dict__[hooks] = {}
    for one in others.values():
        one.grad = torch.zeros_like(one) if one.requires_grad else None
    type(optimizer).step(clone)
    return clone


def _as_number(value: object) -> Tree:
    """Return a number as an array, or a list of numbers as a list of arrays; None for other values."""
    if isinstance(value, tuple | list):
        found = [_as_number(one) for one in value]
        return None if not found or any(one is None for one in found) else found
    if isinstance(value, torch.Tensor):
        return host_array(value).copy()
    return np.asarray(value) if isinstance(value, _NUMBERS) else None


def plain_number(value: Tree) -> Number | tuple[Number, ...]:
    """Return a Python number for an array of no axes, or a tuple of numbers for a list of them."""
    return tuple(plain_number(one) for one in value) if isinstance(value, list | tuple) else np.asarray(value).item()


# ---- layers and learning rates, for sinks of metrics


def layers_of(
    named: Sequence[tuple[str, torch.Tensor]],
    means: Sequence[torch.Tensor | None],
    replicas: Replicas,
    shards: Shards | None = None,
) -> Layers:
    """Return the layers of a step.

    Args:
        named: The trained parameters with their names, before the update; all are on one device.
        means: The mean gradient of each parameter; None for a parameter without one.
        replicas: The replicas of all instances.
        shards: The cuts of the mean gradients; None if they are whole.
    """
    names, variables = layer_names([name for name, _ in named]), [one for _, one in named]
    is_on_host = all(one.device == HOST for one in variables)

    def here(tensor: torch.Tensor | None) -> Leaf:
        return None if tensor is None else host_array(tensor) if is_on_host else tensor.detach()

    def gathered(number: int, part: Leaf) -> np.ndarray:
        assert shards is not None
        part = on_host(part)
        whole = ShapeOfArray(tuple(variables[number].shape), part.dtype)
        return PartOfArray(part, whole, shards, replicas).gather(f"the gradient of {names[number]}")

    on_host, norms = (np.asarray, None) if is_on_host else (host_array, device_norms)
    return Layers(names, [*map(here, variables)], [*map(here, means)], 1.0, shards, on_host, gathered, norms)


def layers_of_loop(parameters: Sequence[tuple[str, torch.nn.Parameter]], replicas: Replicas) -> Layers:
    """Return the layers of a training loop of the program, with the gradients that its optimizer will use."""
    named = [(name, one) for name, one in parameters if one.requires_grad]
    return layers_of(named, [None if one.grad is None else one.grad.to_dense() for _, one in named], replicas)


def device_norms(tensors: Sequence[torch.Tensor | None]) -> np.ndarray:
    """Return the norm of each tensor on a device, float64, after waiting for the device once; 0 for None."""
    found = [each for each in tensors if each is not None]
    norms = iter(torch.stack([torch.linalg.vector_norm(each, dtype=torch.float64) for each in found]).tolist())
    return np.array([0.0 if each is None else next(norms) for each in tensors])


def learning_rates_of(optimizer: torch.optim.Optimizer) -> Mapping[str, float]:
    """Return the learning rate of an optimizer's only group, or of each group by its name or number."""
    groups = optimizer.param_groups
    names = [LEARNING_RATE]
    if len(groups) > 1:
        names = [f"{LEARNING_RATE}/{group.get(_NAME, number)}" for number, group in enumerate(groups)]
    return {name: float(group[_LR]) for name, group in zip(names, groups, strict=True) if _LR in group}
