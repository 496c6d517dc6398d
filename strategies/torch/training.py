"""The state that a PyTorch training changes, also as a tree of arrays, and the plan of its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

import strategies.trees as trees
from collectives import Communicator
from strategies.checkpoints.sealed_folders import Age, HostArray
from strategies.core.agreement import broadcast_bytes
from strategies.errors import StrategyError
from strategies.jax.replicas.replicas import Replicas
from strategies.loss_scaling import LossScale
from strategies.torch.options import TorchOptions
from strategies.torch.replicas.attributes import attributes_of, pack_tree, unpack_tree
from strategies.torch.replicas.buffers import ModelBuffers
from strategies.torch.replicas.module_parts import ModuleWatch
from strategies.torch.replicas.sync_batch_norm import sync_layers_of
from strategies.torch.tensors import HOST, ReplicaMemory, as_array, as_tensor, host_array, real_view
from strategies.torch.updates import (
    GROUPS,
    PARAMS,
    STATE,
    ArraysByName,
    TorchUpdate,
    numbers_of_groups,
    parameters_of,
    set_numbers,
    set_state,
    state_of,
)
from strategies.typing import Tree
from strategies.values import TrainState

IS_MADE = "is_made"
"""The key in an optimizer's tree for one boolean per parameter: whether the optimizer has a state for it.

For a parameter without a state the tree has zeros.
"""

AVERAGES_GRADIENTS = "averages_gradients"
"""The attribute of module classes whose modules average gradients by themselves."""


class TorchTraining:
    """A module, its optimizer, and their progress.

    Attributes:
        watch: The watch over the parts of the module, which the program may replace between steps.
        buffers: The buffers and frozen parameters on which replicas agree.
        attributes: The attributes of the module, of which each replica has its own.
        step: The number of updates so far.
        loss_scale: The scale of the next loss; None without loss scaling.
        memory_of_replicas: The memory in which the replicas compute.
    """

    def __init__(
        self,
        replicas: Replicas,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        update: TorchUpdate,
        options: TorchOptions,
    ) -> None:
        self.module, self.optimizer, self.update = module, optimizer, update
        self.watch = ModuleWatch(module)
        self.buffers = ModelBuffers(module, options.model_state_aggregation, replicas.num_replicas_in_sync)
        self.attributes = attributes_of(module)
        self.step = 0
        self.loss_scale: LossScale | None = None if options.scaling is None else options.scaling.start()
        self.memory_of_replicas = ReplicaMemory(None if options.device is None else device_of(module))
        self._replicas = replicas
        self._age = Age()

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters of the module, in the order of `named_parameters`."""
        return self.watch.parameters

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        """The trained parameters, in the order of `named_parameters`."""
        return [parameter for parameter in self.watch.parameters if parameter.requires_grad]

    def follow(self) -> bool:
        """Find the parts that the module has now; return whether the program has replaced, added or removed some."""
        if not (self.watch.has_other_parts or self.watch.has_other_kinds):
            return False
        for parameter in self.watch.parameters:
            parameter.grad = None  # that of a removed one would be applied in each step
        self.watch.look()
        self.buffers.are_known = False
        check_module(self.module)
        self.replaced()
        return True

    def replaced(self) -> None:
        """Invalidate the states that were returned before."""
        self._age.number += 1

    # ---- as a tree

    def state(self) -> TrainState:
        """Return the present state as views of the tensors' memory, which the next step invalidates."""
        arrays = (*self.tensors(), self._optimizer_tree())
        given: Tree = trees.map(lambda array: HostArray.of(np.asarray(array), self._age), arrays)
        variables, model_state, optimizer = given
        return TrainState(variables, optimizer, self.step, self.loss_scale, model_state)

    def recorded(self) -> TrainState:
        """Return the state that instances compare: parameters, buffers, and optimizer state unless it is sharded."""
        variables, model_state = self.tensors()
        optimizer = None if self.update.is_sharded else state_of(self.optimizer)
        return TrainState(variables, optimizer, self.step, self.loss_scale, model_state)

    def tensors(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray] | None]:
        """Return parameters and buffers by name, as views of host memory or copies from a device. No buffers: None."""
        variables = {name: host_array(real_view(one)) for name, one in self.module.named_parameters()}
        return variables, {name: host_array(real_view(one)) for name, one in self.buffers.named().items()} or None

    def _optimizer_tree(self) -> Tree:
        parameters = parameters_of(self.optimizer)
        is_made = np.array([parameter in self.optimizer.state for parameter in parameters], bool)
        states = state_of(self.optimizer, [number for number, one in enumerate(parameters) if one.requires_grad])
        made = {number: one if is_made[number] else trees.map(np.zeros_like, one) for number, one in states.items()}
        return {STATE: made, GROUPS: numbers_of_groups(self.optimizer), IS_MADE: is_made}

    def whole(self, state: TrainState) -> TrainState:
        """Return the state with a `PartOfArray` in place of every array that this instance has only in part."""
        tree = state.optimizer_state
        whole = {
            number: {name: self.update.whole(number, array) for name, array in of_parameter.items()}
            for number, of_parameter in tree[STATE].items()
        }
        return replace(state, optimizer_state={**tree, STATE: whole})

    # ---- loading

    def load(self, state: TrainState) -> None:
        """Continue from a state, whose arrays are copied."""
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                real_view(parameter).copy_(as_tensor(np.array(state.variables[name])))
            for name, tensor in self.buffers.named().items():
                real_view(tensor).copy_(as_tensor(np.array(state.model_state[name])))
        tree, parameters = state.optimizer_state, parameters_of(self.optimizer)
        set_numbers(self.optimizer, tree[GROUPS])
        is_made = np.asarray(tree[IS_MADE])
        made = {
            number: {name: _unpadded(array, parameters[number]) for name, array in of_parameter.items()}
            for number, of_parameter in tree[STATE].items()
            if is_made[number]
        }
        set_state(self.optimizer, made)
        self.step, self.loss_scale = state.step, state.loss_scale
        self.replaced()

    def share(self, root: int) -> None:
        """Take over the state of instance `root`, except hyperparameters. Collective.

        Nothing changes before everything has arrived, because `root` may be lost on the way.
        """
        self._receive(root)()

    def hand_over(self, root: int, joins: bool) -> None:
        """Take over the state of instance `root` if this instance joins, also hyperparameters. Collective.

        Args:
            root: The instance that has the state.
            joins: Whether this instance joins; if not, its own state stays.
        """
        communicator = self._replicas.communicator
        self.follow()
        self.buffers.follow()
        self.attributes.follow()
        take, packed = self._receive(root), b""
        if communicator.rank == root:
            others = numbers_of_groups(self.optimizer), sorted(self.buffers.moving), self.attributes.packed()
            packed = pack_tree(others)
        packed = broadcast_bytes(communicator, packed, root, "hyperparameters and attributes")
        if joins:
            groups, moving, attributes = unpack_tree(packed)
            self.attributes.unpack(attributes)
            take()
            set_numbers(self.optimizer, groups)
            self.buffers.moving = frozenset(moving)

    def _receive(self, root: int) -> Callable[[], None]:
        """Receive the state of instance `root`, and return a function that takes it over. Collective."""
        communicator = self._replicas.communicator
        scale = self.loss_scale or LossScale(np.float32(0), np.int32(0), np.int32(0))
        words = float(scale.scale), float(scale.good_steps), float(scale.skipped)
        known = np.array([self.step, *words, self.buffers.are_known], np.float64)
        communicator.broadcast(known, root, name="how far the state is")
        tensors = [*self.module.named_parameters(), *self.buffers.named().items()]
        take_tensors, arrays = receive_tensors(tensors, communicator, root), self._received_optimizer(root)

        def take() -> None:
            take_tensors()
            set_state(self.optimizer, arrays)
            self.step = int(known[0])
            if self.loss_scale is not None:
                self.loss_scale = LossScale(np.float32(known[1]), np.int32(known[2]), np.int32(known[3]))
            self.buffers.are_known = bool(known[4])
            self.replaced()

        return take

    def _received_optimizer(self, root: int) -> dict[int, ArraysByName]:
        """Return the optimizer state of instance `root`, for `share`."""
        broadcast = self._replicas.communicator.broadcast
        is_made = np.array([parameter in self.optimizer.state for parameter in parameters_of(self.optimizer)])
        numbers = np.flatnonzero(broadcast(is_made, root, name="which parameters have optimizer state")).tolist()
        own = state_of(self.optimizer, numbers)
        return {
            number: {
                name: broadcast(np.array(array, order="C"), root, name=f"{name} of parameter {number}")
                for name, array in sorted(own[number].items())  # a restored state has another order than a new one
            }
            for number in numbers
        }


def receive_tensors(
    named: Sequence[tuple[str, torch.Tensor]], communicator: Communicator, root: int
) -> Callable[[], None]:
    """Receive the tensors of rank `root` in new memory, and return a function that takes them over. Collective."""
    tensors = [real_view(tensor.detach()) for _, tensor in named]
    received = [one.to(HOST, copy=True, memory_format=torch.contiguous_format) for one in tensors]
    for (name, _), copy in zip(named, received, strict=True):
        communicator.broadcast(as_array(copy), root, name=name)

    def take_over() -> None:
        for tensor, value in zip(tensors, received, strict=True):
            tensor.copy_(value)

    return take_over


def _unpadded(array: np.ndarray | HostArray, parameter: torch.Tensor) -> np.ndarray:
    """Return an array without the padding of a shard, in the shape that the optimizer has."""
    part: np.ndarray = np.asarray(array)
    return part[: parameter.numel()] if part.ndim == 1 and part.size > parameter.numel() else part


def check_module(module: object) -> None:
    """Raise if a module cannot be trained.

    Raises:
        TypeError: If it is no module.
        ValueError: If it has no trained parameter, or a parameter whose shape is not known yet.
        StrategyError: If its parts are on several devices, or a parameter is sparse or has no gradient.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"the module is a {type(module).__name__}; give a torch.nn.Module")
    if lazy := [name for name, one in module.named_parameters() if torch.nn.parameter.is_lazy(one)]:
        raise ValueError(
            f"{lazy[0]} belongs to a lazy module that was not called yet, so its shape is unknown; call the module "
            "once with rows like those of the data set, in every process"
        )
    if wrapped := [name for name, one in module.named_modules() if getattr(type(one), AVERAGES_GRADIENTS, False)]:
        raise StrategyError(
            f"{wrapped[0] or 'the module'} is a DistributedModel, which averages gradients by itself; give its .module"
        )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ValueError("the module has no trained parameter; set requires_grad of at least one parameter")
    device_of(module)
    sync_layers_of(module)
    for name, parameter in module.named_parameters():
        if parameter.layout is not torch.strided:  # only floating-point and complex tensors can require gradients
            raise StrategyError(
                f"{name} is a tensor of layout {parameter.layout}, but only dense gradients are exchanged; keep a "
                "dense parameter, and compute the other from it in the forward pass"
            )


def device_of(module: torch.nn.Module) -> torch.device:
    """Return the device of a module's parameters and buffers.

    Raises:
        StrategyError: If they are on several devices, or on "meta".
    """
    found = {tensor.device: name for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
    if len(found) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in found.items())
        raise StrategyError(f"parts of the module are on several devices, {places}; move it to one: module.to(device)")
    device = next(iter(found), HOST)
    if device.type == "meta":
        raise StrategyError(
            f"{found[device]} is on 'meta', whose tensors have no values; make the module on the CPU or on a GPU"
        )
    return device


def move(module: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move a module and the state of its optimizer to a device.

    Raises:
        StrategyError: If PyTorch makes new parameters there, which the optimizer does not have.
    """
    before = list(map(id, module.parameters()))
    module.to(device)
    if list(map(id, module.parameters())) != before:
        raise StrategyError(
            f"module.to({str(device)!r}) has made new parameters, which the optimizer does not have; move the module "
            "before you construct the optimizer"
        )
    move_state(optimizer, device)


def move_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the state of an optimizer to a device, except counters that PyTorch keeps on the host."""
    for group in optimizer.param_groups:
        counts_there = bool(group.get("capturable") or group.get("fused"))
        for parameter in group[PARAMS]:
            for name, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and (value.ndim or counts_there):
                    optimizer.state[parameter][name] = value.to(device)


def check_on_cpu(module: torch.nn.Module, whose: str) -> None:
    """Raise if a module has a parameter or buffer that is not on the CPU.

    Args:
        module: The module.
        whose: The name of the component that computes on the CPU only.
    """
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.device.type != "cpu":
            raise StrategyError(
                f"{name} is on {tensor.device}, but {whose} computes on the CPU; move the module there with "
                "module.cpu(), or train it on the device with strategies.torch.Trainer (docs: gpus)"
            )
