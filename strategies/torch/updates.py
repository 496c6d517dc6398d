"""The update of a step: PyTorch's optimizer, run once per instance, on the mean gradients of all replicas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import final

import numpy as np
import torch
import torch.optim.optimizer as of_torch
from typing_extensions import override

from strategies.errors import StrategyError
from strategies.exchange.on_device import DevicePath
from strategies.exchange.shards import ShardedArrays, Shards
from strategies.jax.replicas.replicas import Replicas
from strategies.jax.replicas.shards import PartOfArray, shards_of
from strategies.torch.optimizer_arrays import PARAMS, parameters_of
from strategies.torch.options import TorchOptions
from strategies.torch.replicas.groups import groups_of
from strategies.torch.tensors import as_tensor, dtype_of, host_array
from strategies.trees import ShapeOfArray

ELEMENTWISE = (
    "ASGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
"""Optimizers of `torch.optim` that compute each element from the same element of gradient, state and parameter."""
_WITHOUT_CLIPPING = ("torch.", "strategies.")
"""Modules whose hooks of all optimizers count steps or raise errors."""


class TorchUpdate(ABC):
    """The update of parameters in place, from mean gradients.

    The engine asks for `shards` when it plans the exchange, and calls `apply` once per step, on all instances. If
    `apply` raises, parameters and optimizer state may have changed in part; the error is final.
    """

    path: DevicePath | None = None
    """The path of gradients that stay on a device; None if the host exchanges them."""

    @property
    @abstractmethod
    def shards(self) -> Shards | None:
        """The cut of mean gradients into shards, one per instance; None if every instance gets whole means."""

    @property
    @abstractmethod
    def wholes(self) -> Sequence[torch.nn.Parameter]:
        """The whole parameters, in the order in which the optimizer numbers their state."""

    @abstractmethod
    def apply(self, means: Sequence[tuple[torch.nn.Parameter, torch.Tensor | None]]) -> None:
        """Update the parameters that have a mean gradient; others stay as they are, as with PyTorch's optimizers.

        Args:
            means: Each trained parameter with its mean gradient, whole or as this instance's flat shard; None without
                one.
        """


@final
class WholeTorchUpdate(TorchUpdate):
    """An update with the whole optimizer state on every instance."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    @property
    @override
    def shards(self) -> Shards | None:
        """None: the means are whole."""
        return None

    @property
    @override
    def wholes(self) -> Sequence[torch.nn.Parameter]:
        return parameters_of(self._optimizer)

    @override
    def apply(self, means: Sequence[tuple[torch.nn.Parameter, torch.Tensor | None]]) -> None:
        for parameter, mean in means:
            parameter.grad = mean
        self._optimizer.step()


@final
class ShardedTorchUpdate(TorchUpdate):
    """An update with sharded optimizer state, like stage 1 of ZeRO (Rajbhandari et al., 2020).

    An instance with r of R replicas keeps r/R of the optimizer state, and updates that part of the parameters. Then
    instances gather the new parameters. The optimizer gets this instance's shards as parameters: flat views of the
    whole parameters.

    Args:
        replicas: The replicas of all instances.
        optimizer: The optimizer of all parameters. From here on it holds the shards.
        min_elements: The state of smaller parameters stays whole on every instance.

    Raises:
        StrategyError: If the optimizer is not known to be elementwise, or has a state or step hooks already.
    """

    def __init__(self, replicas: Replicas, optimizer: torch.optim.Optimizer, min_elements: int) -> None:
        refuse_across_elements(optimizer)
        _refuse_step_hooks(optimizer)
        if optimizer.state:
            raise StrategyError("the optimizer has already made steps; give a new one, whose state can be sharded")
        self._replicas = replicas
        self._optimizer = optimizer
        self._shards = shards_of(replicas, min_elements)
        self._parts: dict[int, torch.nn.Parameter] = {}  # the shard of each whole parameter, by its id
        self._memory: dict[int, int] = {}  # the address of each sharded whole parameter, by its id
        self._wholes: list[torch.nn.Parameter] = []  # in the order of the optimizer
        for group in optimizer.param_groups:
            group[PARAMS] = [self._part_of(parameter) for parameter in group[PARAMS]]
        self._numbered = list(map(id, parameters_of(optimizer)))
        shapes = [ShapeOfArray(tuple(one.shape), dtype_of(one)) for one in self._wholes]
        self._gathered = ShardedArrays(self._shards, shapes, "parts of parameters")

    @property
    @override
    def shards(self) -> Shards | None:
        """The shards of the state, if the transport can scatter reductions; None for whole means."""
        return self._shards if self._replicas.communicator.scatters_reductions else None

    @property
    @override
    def wholes(self) -> Sequence[torch.nn.Parameter]:
        return self._wholes

    def whole(self, number: int, array: np.ndarray) -> np.ndarray | PartOfArray:
        """Return an array of a parameter's state, as a `PartOfArray` if it is sharded.

        Args:
            number: The number of the parameter in the optimizer.
            array: The array on this instance.
        """
        whole = self._wholes[number]
        if not array.ndim or not self._shards.divides(whole):
            return array
        shape = ShapeOfArray(tuple(whole.shape), array.dtype)
        return PartOfArray(self._shards.padded(array, whole), shape, self._shards, self._replicas)

    @override
    def apply(self, means: Sequence[tuple[torch.nn.Parameter, torch.Tensor | None]]) -> None:
        """Update this instance's shards, and gather the parameters. Collective."""
        self._begin()
        for parameter, mean in means:
            part = self._parts.get(id(parameter))
            if part is None or mean is None:
                parameter.grad = mean
            elif mean.numel() == parameter.numel():
                part.grad = mean.reshape(-1)[self._bounds(parameter)]
            else:
                part.grad = mean.reshape(-1)[: part.numel()]
        self._optimizer.step()
        self._gather()

    def _begin(self) -> None:
        """Follow the program's changes, and drop the gradients of the last step, of frozen parameters too."""
        _refuse_step_hooks(self._optimizer)
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
        self._wholes.append(parameter)
        if not self._shards.divides(parameter):
            return parameter
        part = torch.nn.Parameter(self._view(parameter), parameter.requires_grad)
        self._parts[id(parameter)], self._memory[id(parameter)] = part, parameter.data_ptr()
        return part

    def _view(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        if not parameter.is_contiguous():
            raise StrategyError(
                "a parameter is not contiguous in memory, so its state cannot be sharded; make it contiguous"
            )
        return parameter.detach().view(-1)[self._bounds(parameter)]

    def _bounds(self, parameter: torch.nn.Parameter) -> slice:
        return self._shards.bounds(parameter, self._replicas.local_replicas.start)

    def _gather(self) -> None:
        """Gather the shards of all instances into the memory of the parameters."""
        if self._replicas.num_instances == 1:
            return
        with torch.no_grad():
            for number, members in self._gathered.members.items():
                buffer = self._gathered.layout.buffers[number]
                places = list(zip([self._wholes[one] for one in members], buffer.starts, strict=True))
                device = places[0][0].device
                own = torch.zeros(buffer.size, dtype=as_tensor(np.empty(0, buffer.dtype)).dtype, device=device)
                for parameter, start in places:
                    part = self._parts[id(parameter)]
                    own[start : start + part.numel()].copy_(part)
                gathered = self._gathered_on(number, own)
                for parameter, start in places:
                    self._put(parameter, gathered[:, start:])

    def _gathered_on(self, number: int, own: torch.Tensor) -> torch.Tensor:
        """Return the shards of all instances in a buffer: on the device if gradients stay there, else on the host."""
        if self.path is not None:
            found: torch.Tensor = self.path.gather(f"parts of parameters/{number}", own)
            return found
        return as_tensor(self._gathered.gather(number, host_array(own), self._replicas.communicator))

    def _put(self, parameter: torch.nn.Parameter, gathered: torch.Tensor) -> None:
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


def refuse_across_elements(optimizer: torch.optim.Optimizer) -> None:
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


def _refuse_step_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Raise if a function of the program runs before or after the optimizer's steps.

    Raises:
        StrategyError: If there is one.
    """
    of_all = [*of_torch._global_optimizer_pre_hooks.values(), *of_torch._global_optimizer_post_hooks.values()]
    hooks = [
        *optimizer._optimizer_step_pre_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
        *(one for one in of_all if not _module_of(one).startswith(_WITHOUT_CLIPPING)),
    ]
    if hooks:
        raise StrategyError(
            f"the step hook {getattr(hooks[0], '__qualname__', hooks[0])} of the optimizer would see parts of "
            "gradients and parameters, because the optimizer state is sharded; remove the hook, or use "
            "replicated_optimizer_state_sharding=False"
        )


def _module_of(hook: object) -> str:
    return str(getattr(getattr(hook, "func", hook), "__module__", ""))


def refuse_groups(module: torch.nn.Module, optimizer: torch.optim.Optimizer, options: TorchOptions) -> None:
    """Raise if the optimizer, or the dtype in which gradients travel, would mix the rows of groups of replicas."""
    grouped = [name for name, parameter in module.named_parameters() if groups_of(parameter) is not None]
    if not grouped:
        return
    if options.transfer.is_quantised:
        raise StrategyError(
            f"{grouped[0]} has a row for each group of replicas, but int8 gradients are quantised whole; use "
            "gradient_transfer_dtype='bfloat16'"
        )
    if not is_elementwise(optimizer):
        raise StrategyError(
            f"{grouped[0]} has a row for each group of replicas, but {type(optimizer).__name__} is not known to "
            f"compute every element by itself; use one of {', '.join(ELEMENTWISE)}, or give the class an attribute "
            "is_elementwise = True if it does"
        )


def refuse_weights(module: torch.nn.Module, options: TorchOptions) -> None:
    """Raise if the weights of losses cannot be heeded.

    Raises:
        StrategyError: If a parameter has a row for each group of replicas.
        ValueError: If gradients travel as float16.
    """
    for name, parameter in module.named_parameters():
        if groups_of(parameter) is not None:
            raise StrategyError(
                f"losses have weights, but {name} has a row for each group of replicas, and weighted means are over "
                "all of them; leave the weights out, or let all replicas share the parameter"
            )
        if parameter.requires_grad and not options.transfer.is_quantised:
            refuse_float16(name, options.transfer.dtype_of(dtype_of(parameter)))


def refuse_float16(name: str, dtype: np.dtype) -> None:
    """Raise if gradients that are multiplied by the weights of losses would travel as float16.

    Raises:
        ValueError: If they would.
    """
    if dtype == np.float16:
        raise ValueError(
            f"losses have weights, but the gradient of {name} travels as float16, which overflows when it is "
            "multiplied by large weights; use gradient_transfer_dtype='bfloat16', or no weights"
        )


def refuse_optimizers(optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> None:
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
    own = {id(parameter) for parameter in module.parameters()}
    others = [one for one in parameters_of(optimizer) if id(one) not in own]
    if others:
        raise ValueError(
            f"the optimizer has {len(others)} parameters that do not belong to the module, the first of shape "
            f"{list(others[0].shape)}; make it with module.parameters()"
        )
