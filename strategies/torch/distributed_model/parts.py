"""The parts of a module in a training loop of the program: buffers, the plan of gradients, and comparisons of both."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from strategies.core.agreement import broadcast_text, insist_on_agreement, insist_on_same_bits
from strategies.errors import StrategyError
from strategies.jax.comparing.agreement import digest_of, host_arrays
from strategies.jax.replicas.replicas import Replicas
from strategies.torch.agreement import broadcast_order, hash_at_step, order_of, put_in_order, settings_differ
from strategies.torch.distributed_model.passes import GradientHooks, Named
from strategies.torch.exchange.gradients import GradientExchange
from strategies.torch.exchange.paths import path_of_loops
from strategies.torch.exchange.plan import Parameter, Tail, TorchGradientPlan
from strategies.torch.options import TorchOptions, check_weighted_dtype
from strategies.torch.replicas.buffers import ModelBuffers
from strategies.torch.replicas.gradient_map import GroupRow
from strategies.torch.replicas.guard import WriteMarks, is_due, raise_written
from strategies.torch.replicas.module_parts import ModuleWatch, Slot
from strategies.torch.tensors import HOST, ReplicaMemory, as_array, dtype_of, have_same_bits, host_array, real_view
from strategies.torch.training import check_module, received_tensors, take_over
from strategies.typing import Tree


@dataclass(frozen=True)
class PassResult:
    """The results of one replica's forward and backward pass.

    Attributes:
        loss: The loss; the sum of the weighted losses if they have weights.
        gradients: The gradients of the parameters to which this pass has added one, by the parameter's id.
        slots: The buffers and frozen parameters after the pass, if the module has others by now.
        changes: Whether the pass has changed a buffer or frozen parameter, 0 or 1, by name.
        losses: The loss of each micro-batch, without its weight.
        weight: The sum of the weights of the losses; None if they have no weights.
    """

    loss: float
    gradients: Mapping[int, torch.Tensor | None]
    slots: Sequence[Slot]
    changes: Mapping[str, float]
    losses: Sequence[torch.Tensor]
    weight: float | None

    def of(self, named: Named) -> list[torch.Tensor | None]:
        """Return the gradients of these parameters, None for parameters without one."""
        return [self.gradients.get(id(one)) for _, one in named]

    def changes_of(self, slots: Sequence[Slot]) -> list[float]:
        """Return the changes in the order of the module's slots; a buffer that is new counts as changed."""
        return [self.changes.get(slot.name, float(not slot.is_parameter)) for slot in slots]

    def slots_of(self, slots: Sequence[Slot]) -> list[Slot]:
        """Return the slots after the pass in the order of the module's slots."""
        own = {slot.name: slot for slot in self.slots}
        return [own.get(slot.name, slot) for slot in slots]


@dataclass(frozen=True)
class MeanPassResult:
    """The results of a backward pass over all replicas, equal on all instances.

    Attributes:
        loss: The mean loss.
        gradients: The mean gradients, in the order of the plan; None for a parameter without one.
        buffers: The agreed values of the buffers and frozen parameters that have changed, by number.
        weight: The mean weight of the losses; None if they have no weights.
        active: The share of the replicas that have made the pass.
    """

    loss: float
    gradients: Sequence[torch.Tensor | None]
    buffers: Mapping[int, torch.Tensor]
    weight: float | None = None
    active: float = 1.0

    def kept(self) -> MeanPassResult:
        """Return copies, which the program cannot change."""
        gradients = [None if one is None else one.detach().clone() for one in self.gradients]
        buffers = {number: one.clone() for number, one in self.buffers.items()}
        return MeanPassResult(self.loss, gradients, buffers, self.weight)


class WrittenBuffers:
    """The buffers and frozen parameters that forward passes have changed since replicas agreed on them.

    Args:
        model: The buffers on which replicas agree.
        watch: The watch over the module.

    Attributes:
        passes: The number of forward passes with the present parts of the module.
    """

    def __init__(self, model: ModelBuffers, watch: ModuleWatch) -> None:
        self._model, self._watch = model, watch
        self._frozen: set[str] = set()  # the names of frozen parameters that were written
        self._known: set[str] = set()  # those that are written through `data`
        self.passes = 0
        self.begin()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch a forward pass. In passes 1, 2, 4, 8 and so on bits are compared, too.

        Raises:
            StrategyError: If the pass has written a trained parameter. Also if it has written an undeclared frozen
                parameter through `data`, and this was seen only after the first pass.
        """
        self.passes += 1
        named, names = self._watch.named, self._model.declared
        marks = WriteMarks(named, is_due(self.passes))
        declared = WriteMarks([pair for pair in named if pair[0] in names], True)
        yield
        counted, by_bits = marks.counted(), marks.by_bits()
        late = by_bits - counted - self._known if self.passes > 1 else set()
        for name, one in named:
            if (name in late and name not in names) or (one.requires_grad and name in counted | by_bits):
                raise_written(name, one)
        self._frozen |= declared.by_bits() | self._known | counted | by_bits
        self._known |= by_bits - counted

    def begin(self) -> None:
        """Copy the buffers, to find changes later."""
        buffers = [slot for slot in self._model.slots if not slot.is_parameter]
        self._masters = {slot.name: slot.tensor.detach().clone() for slot in buffers}

    def follow(self) -> None:
        """Find the buffers that the module has now. New ones count as changed."""
        self._model.follow()
        for number, slot in enumerate(self._model.slots):
            if not slot.is_parameter and slot.name not in self._masters:
                self._masters[slot.name] = slot.tensor.detach().clone()
                self._model.moving |= {number}

    def changed(self) -> dict[str, float]:
        """Return for each buffer, and each frozen parameter that was written, whether passes have changed it."""
        found = dict.fromkeys(self._frozen, 1.0)
        for number, slot in enumerate(self._model.slots):
            if not slot.is_parameter:
                has_changed = number in self._model.moving or not have_same_bits(slot.tensor, self._masters[slot.name])
                found[slot.name] = float(has_changed)
        return found

    def keep(self, values: dict[int, torch.Tensor]) -> None:
        """Put the values on which all replicas have agreed into buffers and frozen parameters, by their numbers."""
        self._model.keep(values)
        for slot in map(self._model.slots.__getitem__, values):
            if not slot.is_parameter:
                self._masters[slot.name] = slot.tensor.detach().clone()
        self._frozen.clear()


NAMES = ("active", "changed", "loss", "weight", "weighted")
"""The numbers that travel with gradients: whether the replica is still in its loop, whether it needs a new plan, its
loss if it is known, the weight of its losses, and whether they have weights."""


class AveragedParts:
    """The parts of a module on which replicas agree, which the program may change between two steps.

    Args:
        module: The module.
        replicas: The replicas of all instances.
        options: The options of the loop.
        watch: The watch over the module.
        hooks: The hooks on the gradients of the parameters, which follow changes of the module.

    Attributes:
        watch: The given watch.
        buffers: The buffers on which replicas agree.
        changes: The changes of these buffers, and of frozen parameters.
        number: The number of the model among those that share a communicator; 0: not known yet.
        named: The parameters of the plan, with their names.
        numbers: The places in the plan, by the ids of parameters.
        slots: The buffers and frozen parameters of the plan.
        known: The ids of the parameters that have the same values on all instances.
        exchange: The exchange of the gradients; None before the first plan.
        is_behind: Whether the module has changed, so that a new plan is needed.
        leaves_early: Whether gradients are exchanged while backward passes run.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        replicas: Replicas,
        options: TorchOptions,
        watch: ModuleWatch,
        hooks: GradientHooks,
    ) -> None:
        self._module, self._replicas, self._options, self._hooks = module, replicas, options, hooks
        self.watch = watch
        self._writes_before = 0  # the number of writes to parameters when instances last had the same bits
        own, count = replicas.local_replicas.start, replicas.num_replicas_in_sync
        self.buffers = ModelBuffers(module, options.model_state_aggregation, count, own)
        self.changes = WrittenBuffers(self.buffers, self.watch)
        self.number = 0
        self.named: list[tuple[str, torch.nn.Parameter]] = []
        self.numbers: dict[int, int] = {}
        self.slots: Sequence[Slot] = ()
        self.known: set[int] = set()
        self.exchange: GradientExchange | None = None
        self.is_behind = self.leaves_early = False
        hooks.follow(self.watch.named)

    @property
    def device(self) -> torch.device:
        """The device of the module."""
        return self.watch.named[0][1].device

    @property
    def _trained(self) -> list[tuple[str, torch.nn.Parameter]]:
        """The parameters that are trained now or that the plan has: a layer may be frozen for a while."""
        return [(name, one) for name, one in self.watch.named if one.requires_grad or id(one) in self.numbers]

    # ---- agreement with the other instances

    def begin_alike(self, root: int) -> None:
        """Take over the parameters and buffers of the instance `root`. Collective."""
        named = [*self._module.named_parameters(), *self._module.named_buffers()]
        take_over(named, received_tensors(named, self._replicas.communicator, root))
        self.known = {id(one) for _, one in self.watch.named}
        self.changes.begin()
        self._writes_before = self.watch.writes

    def insist_on_agreement(self, compared: Sequence[torch.Tensor] = ()) -> None:
        """Compare parameters, buffers and options with the other instances. Collective.

        Args:
            compared: The parameters whose values are compared, too.

        Raises:
            DisagreementError: On all instances, if they differ.
        """
        digests = {id(one): f", digest {digest_of(host_array(one))[0]:x}" for one in compared}
        terms = {name: f"{_described(one)}{digests.get(id(one), '')}" for name, one in self.watch.named}
        buffers = {slot.name: f"buffer {slot.tensor.dtype}" for slot in self.buffers.slots}
        options = {
            "seed": str(self._options.seed),
            "gradient_transfer_dtype": str(self._options.transfer.dtype),
            "missing_gradients": self._options.missing_gradients,
            "zero_weight": self._options.zero_weight,
        }
        insist_on_agreement(self._replicas, [options, terms, buffers])
        self.known = {id(one) for _, one in self.watch.named}

    def settings_hash(self, step: int) -> int:
        """Return the hash that travels with a step: it differs if instances have written parameters unequally often."""
        return hash_at_step(step, self.watch.writes - self._writes_before)

    def compare_bits(self, step: int, hashes: tuple[float, float]) -> None:
        """Compare the bits of parameters, and the step, if hashes differ, and in steps 1, 2, 4, 8, ... Then collective.

        Args:
            step: The number of the step.
            hashes: The mean of the hashes of all instances, and of their squares.

        Raises:
            DivergenceError: On all instances, if bits differ.
        """
        if settings_differ(*hashes) or (step and is_due(step)):
            named = [*self._module.named_parameters(), ("steps_made", torch.tensor(step))]
            state = {name: host_array(one) for name, one in named}
            insist_on_same_bits(self._replicas, host_arrays(state), step)
            self._writes_before = self.watch.writes

    # ---- the plan

    def take_order(self) -> None:
        """Give the parts of the module the order that they have on the first instance. Collective."""
        put_in_order(self._module, broadcast_order(self._replicas, order_of(self._module)))
        self._follow_module()

    def plan_anew(self) -> None:
        """Make a plan for the parameters that are trained now. Collective."""
        check_module(self._module)
        self.take_order()
        new = [one for _, one in self._trained if id(one) not in self.numbers]
        self.insist_on_agreement([*new, *(one for _, one in self.watch.named if id(one) not in self.known)])
        self.make_plan()

    def plan_for_others(self) -> None:
        """Make a plan among the instances that are left. Collective."""
        is_behind = self.is_behind  # then new parts of the module are still to be compared
        self._follow_module()
        self.make_plan()
        self.is_behind = is_behind

    def _follow_module(self) -> None:
        """Find the parameters and buffers that the module has now."""
        self.watch.look()
        self._hooks.follow(self.watch.named)
        self.changes.follow()

    def make_plan(self) -> None:
        """Make a plan for the parameters that the watch knows. Collective."""
        self.named = self._trained
        self.numbers = {id(one): number for number, (_, one) in enumerate(self.named)}
        self.is_behind = False
        self._writes_before = self.watch.writes
        self.slots = self.buffers.slots
        self.exchange = self._new_exchange()
        self.leaves_early = self.exchange.plan.streams and self._replicas.num_replicas_in_sync > 1

    def _new_exchange(self) -> GradientExchange:
        """Return the exchange for the parameters of the plan. Collective."""
        replicas, memory = self._replicas, ReplicaMemory(self.device)
        parameters = tuple(Parameter.of(*one) for one in self.named)
        title = "gradients" if self.number == 1 else f"gradients of model {self.number}"
        plan = TorchGradientPlan(parameters, self._options.transfer, title=title)
        rows: list[dict[int, GroupRow]] = [{} for _ in replicas.local_replicas]
        if 1 < replicas.num_replicas_in_sync == replicas.communicator.size:
            late = "gradients on a device are exchanged when the backward pass has ended; leave stream_gradients out"
            path = path_of_loops(replicas, self.device, late if self._options.stream_gradients else "")
            if path is not None:
                return GradientExchange(plan, NAMES, replicas, memory, rows, path)
        tail = Tail.size(len(NAMES), len(parameters), len(self.slots))
        whole = replace(plan, streams=self._options.streams_over(replicas), tail=tail)
        allocate = replicas.communicator.allocate
        return GradientExchange(whole, NAMES, replicas, memory, rows, None, allocate, not whole.streams)

    def shared(self, means: MeanPassResult | None, root: int) -> MeanPassResult:
        """Return the means that the instance `root` has. Collective.

        Args:
            means: The means on instances that have them; None elsewhere.
            root: The rank of an instance that has them.
        """
        named, communicator = self.named, self._replicas.communicator
        slots = {number: slot.tensor for number, slot in enumerate(self.buffers.slots)} | self.buffers.own
        own: Mapping[str, Tree] = {}
        if means is not None:
            gradients = [number for number, one in enumerate(means.gradients) if one is not None]
            own = {"loss": means.loss, "weight": means.weight, "gradients": gradients, "buffers": [*means.buffers]}
        sent = json.loads(broadcast_text(communicator, json.dumps(own), root, "which means there are"))

        def received(name: str, like: torch.Tensor) -> torch.Tensor:
            copy = like.detach().to(HOST, copy=True, memory_format=torch.contiguous_format)
            communicator.broadcast(as_array(real_view(copy)), root, name=name)
            return copy.to(like.device)

        found: list[torch.Tensor | None] = [None] * len(named)
        for number in sent["gradients"]:
            name, parameter = named[number]
            mine = None if means is None else means.gradients[number]
            found[number] = received(f"mean gradient of {name}", parameter if mine is None else mine)
        buffers = {}
        for number in sent["buffers"]:
            buffers[number] = received(f"buffer {number}", slots[number] if means is None else means.buffers[number])
        return MeanPassResult(sent["loss"], found, buffers, sent["weight"])

    # ---- changes of the module

    def follow(self) -> None:
        """Find the parts that the module has now, of which some are new."""
        self.watch.look()
        self.is_behind = True
        self.changes.passes = 0
        self._hooks.follow(self.watch.named)

    def look_again(self) -> None:
        """Compare the module with the plan, and record whether a new plan is needed.

        Raises:
            StrategyError: If a parameter is new, and its gradient was missed.
        """
        watch = self.watch
        if watch.has_other_parts:
            named = self._module.named_parameters()
            if unknown := [name for name, one in named if one not in self._hooks and one.requires_grad]:
                raise StrategyError(
                    f"{unknown[0]} is new in the module, and its gradient was missed in a backward pass that "
                    "does not come from the DistributedModel; call the DistributedModel, not the module in it"
                )
            self.follow()
        if watch.has_other_kinds:
            watch.look()
            self.is_behind = True
        if any(one.requires_grad and id(one) not in self.numbers for one in watch.parameters):
            self.is_behind = True

    # ---- what is refused

    def check_gradients_present(self, came: Container[int]) -> None:
        """Raise if a parameter whose gradient came has none at the end of the backward pass.

        Args:
            came: The ids of the parameters whose gradients came.
        """
        for name, parameter in self.watch.named:
            if parameter.grad is None and id(parameter) in came:
                raise StrategyError(
                    f"the gradient of {name} is gone at the end of the backward pass, as if a hook had applied it "
                    "before it was averaged; leave it in grad, and apply it after backward() has returned"
                )

    def check_weights_supported(self) -> None:
        """Raise if weighted gradients would exceed the range of the dtype in which they travel.

        Raises:
            ValueError: If a gradient travels as float16.
        """
        for name, one in self._trained:
            check_weighted_dtype(name, self._options.transfer.dtype_of(dtype_of(one)))


def _described(parameter: torch.Tensor) -> str:
    where = "" if parameter.device.type == "cpu" else f" on {parameter.device.type}"
    return f"{parameter.dtype}{list(parameter.shape)} {'trained' if parameter.requires_grad else 'frozen'}{where}"
