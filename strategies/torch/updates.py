"""The update of a step: PyTorch's optimizer, once per instance, on the mean gradients of all replicas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import final

import jax
import numpy as np
import torch

from strategies.errors import StrategyError
from strategies.exchange.on_device import DevicePath
from strategies.exchange.shards import ShardedArrays, Shards
from strategies.jax.replicas.replicas import Replicas
from strategies.jax.replicas.shards import PartOfArray, shards_of
from strategies.torch.optimizer_arrays import PARAMS, parameters_of
from strategies.torch.options import TorchOptions
from strategies.torch.replica_groups import groups_of
from strategies.torch.tensors import as_tensor, dtype_of, host_array

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
"""The optimizers of `torch.optim` that compute every element from those of gradient, state and parameter alone."""


class TorchUpdate(ABC):
    """New parameters, in place, of mean gradients."""

    path: DevicePath | None = None
    """The path of gradients that stay on a device; None: they are exchanged on the host."""

    @property
    @abstractmethod
    def shards(self) -> Shards | None:
        """The way mean gradients are cut, of which this instance takes its part; None: it takes them whole."""

    @abstractmethod
    def apply(self, means: Sequence[tuple[torch.nn.Parameter, torch.Tensor | None]]) -> None:
        """Update the parameters that have a mean gradient; the others are let alone, as optimizers of PyTorch do.

        Args:
            means: of each parameter that is trained: in its shape and dtype, or this instance's part, flat.
        """


@final
class WholeTorchUpdate(TorchUpdate):
    """The whole optimizer state on every instance."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def shards(self) -> Shards | None:
        """See `TorchUpdate`: they are whole."""
        return None

    def apply(self, means: Sequence[tuple[torch.nn.Parameter, torch.Tensor | None]]) -> None:
        """See `TorchUpdate`."""
        for parameter, mean in means:
            parameter.grad = mean
        self._optimizer.step()


@final
class ShardedTorchUpdate(TorchUpdate):
    """Each instance keeps (its replicas / R) of the optimizer state; the new parameters are gathered.

    The optimizer gets parameters of one axis, which are this instance's parts of the others in their memory.

    Args:
        optimizer: of all parameters; from here on of the parts.
        min_elements: smaller parameters have their state whole on every instance.

    Raises:
        StrategyError: if it is not known that the optimizer looks at elements one by one, or it has a state already.
    """

    def __init__(self, replicas: Replicas, optimizer: torch.optim.Optimizer, min_elements: int) -> None:
        refuse_across_elements(optimizer)
        if optimizer.state:
            raise StrategyError("the optimizer has made steps already; give a new one, whose state can be sharded")
        self._replicas = replicas
        self._optimizer = optimizer
        self._shards = shards_of(replicas, min_elements)
        self._parts: dict[int, torch.nn.Parameter] = {}  # by the id of the whole
        self._memory: dict[int, int] = {}  # where the whole is of which that is a part
        self._wholes: list[torch.nn.Parameter] = []  # by their numbers in the optimizer
        for group in optimizer.param_groups:
            group[PARAMS] = [self._part_of(parameter) for parameter in group[PARAMS]]
        self._numbered = list(map(id, parameters_of(optimizer)))
        shapes = [jax.ShapeDtypeStruct(tuple(one.shape), dtype_of(one)) for one in self._wholes]
        self._gathered = ShardedArrays(self._shards, shapes, "parts of parameters")

    @property
    def shards(self) -> Shards | None:
        """See `TorchUpdate`: as the state is, where the transport can."""
        return self._shards if self._replicas.communicator.scatters_reductions else None

    def whole(self, number: int, array: np.ndarray) -> np.ndarray | PartOfArray:
        """Return an array of a parameter's state, by its number in the optimizer: a `PartOfArray` where it is cut."""
        whole = self._wholes[number]
        if not array.ndim or not self._shards.divides(whole):
            return array
        shape = jax.ShapeDtypeStruct(tuple(whole.shape), array.dtype)
        return PartOfArray(self._shards.padded(array, whole), shape, self._shards, self._replicas)

    def apply(self, means: Sequence[tuple[torch.nn.Parameter, torch.Tensor | None]]) -> None:
        """See `TorchUpdate`; a collective call."""
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
        """Follow what the program has changed, and drop the gradients of the last step, of frozen parameters too."""
        if list(map(id, parameters_of(self._optimizer))) != self._numbered:
            raise StrategyError(
                "the optimizer's groups have other parameters than when the Trainer was made, and its state is sharded "
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
                "a parameter is not contiguous in memory; give the module one that is, to shard its state"
            )
        return parameter.detach().view(-1)[self._bounds(parameter)]

    def _bounds(self, parameter: torch.nn.Parameter) -> slice:
        return self._shards.bounds(parameter, self._replicas.local_replicas.start)

    def _gather(self) -> None:
        """Gather the parts of all instances into the memory of the parameters."""
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
        """Return the parts of all instances in a buffer: on the device, if gradients stay there; else on the host."""
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
    """Whether it is known that an optimizer computes every element from those of gradient, state and parameter."""
    kind = type(optimizer)
    is_known = kind.__module__.startswith("torch.optim") and kind.__name__ in ELEMENTWISE
    return is_known or bool(getattr(optimizer, "is_elementwise", False))


def refuse_across_elements(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer of which it is not known that it computes element by element.

    Raises:
        StrategyError: it is neither one of `ELEMENTWISE`, nor does its class say `is_elementwise = True`; or it has a
            fused kernel, which on CPUs rounds the last elements of an array otherwise than those before them.
    """
    kind = type(optimizer)
    if any(group.get("fused") for group in optimizer.param_groups):
        raise StrategyError(
            f"the optimizer state cannot be sharded: {kind.__name__} has fused=True, whose kernel rounds elements at "
            "the end of an array otherwise, and where parts end depends on the number of instances; use fused=False, "
            "or replicated_optimizer_state_sharding=False"
        )
    if not is_elementwise(optimizer):
        raise StrategyError(
            f"the optimizer state cannot be sharded: of {kind.__name__} it is not known that it looks at every element "
            f"alone; use one of {', '.join(ELEMENTWISE)}, give the class an attribute is_elementwise = True if it "
            "does, or use replicated_optimizer_state_sharding=False"
        )


def refuse_groups(module: torch.nn.Module, optimizer: torch.optim.Optimizer, options: TorchOptions) -> None:
    """Refuse rows of groups of replicas if the optimizer, or the way in which gradients travel, would mix them."""
    grouped = [name for name, parameter in module.named_parameters() if groups_of(parameter) is not None]
    if not grouped:
        return
    if options.transfer.is_quantised:
        raise StrategyError(
            f"groups of replicas have rows of {grouped[0]}, and int8 gradients are quantised whole; use "
            "gradient_transfer_dtype='bfloat16'"
        )
    if not is_elementwise(optimizer):
        raise StrategyError(
            f"groups of replicas have rows of {grouped[0]}, and of {type(optimizer).__name__} it is not known that it "
            f"looks at every element alone; use one of {', '.join(ELEMENTWISE)}, or give the class an attribute "
            "is_elementwise = True if it does"
        )


def refuse_optimizers(optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> None:
    """Look at what is to update a module.

    Raises:
        TypeError: if it is no optimizer.
        StrategyError: if it computes the loss by itself.
        ValueError: if it has parameters that are not the module's.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"the optimizer is a {type(optimizer).__name__}; give one of torch.optim, made already")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise StrategyError("LBFGS computes the loss several times in a step; use an optimizer that takes gradients")
    own = {id(parameter) for parameter in module.parameters()}
    others = [one for one in parameters_of(optimizer) if id(one) not in own]
    if others:
        raise ValueError(
            f"the optimizer has {len(others)} parameters that are none of the module's, the first of shape "
            f"{list(others[0].shape)}; make it with module.parameters()"
        )
