"""The parts of a module in a training loop of the program, and the comparisons of them between instances."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from strategies.core.agreement import insist_on_agreement
from strategies.core.digest import insist_on_same_bits
from strategies.errors import StrategyError
from strategies.jax.comparing.digest import digest_of, host_arrays
from strategies.jax.replicas.replicas import Replicas
from strategies.torch.agreement import order_of, put_in_order, settings_differ, told_order, word_of
from strategies.torch.device import ReplicaMemory
from strategies.torch.distributed_model.backward_passes import GradientHooks, LocalGradients
from strategies.torch.exchange.device import DeviceExchange
from strategies.torch.exchange.host import HostExchange
from strategies.torch.exchange.interface import GradientExchange
from strategies.torch.exchange.paths import path_of_loops
from strategies.torch.exchange.plan import Parameter, Tail, TorchGradientPlan
from strategies.torch.options import TorchOptions
from strategies.torch.replicas.buffers import ModelBuffers
from strategies.torch.replicas.groups import GroupRow
from strategies.torch.replicas.guard import WriteMarks, refuse_write
from strategies.torch.replicas.module_parts import ModuleParts, ModuleWatch, Slot
from strategies.torch.tensors import dtype_of, have_same_bits, host_array
from strategies.torch.training import received_tensors, refuse_modules, take_over
from strategies.torch.updates import refuse_float16


class ForwardWatch:
    """A watcher of the forward passes of a module that is a replica itself and may write frozen parameters.

    Args:
        module: The module.
        declared: The names of frozen parameters that the program has declared to be written.

    Attributes:
        frozen: The names of frozen parameters that forward passes have written. The reader clears the set.
    """

    def __init__(self, module: torch.nn.Module, declared: Container[str] = ()) -> None:
        self._module = module
        self._declared = declared
        self.frozen: set[str] = set()
        self._known: set[str] = set()  # those that are written through `data`
        self._look()

    def _look(self) -> None:
        self._parts, self._passes = ModuleParts(self._module), 0
        self._named = list(self._module.named_parameters())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch a forward pass. In passes 1, 2, 4, 8 and so on bits are compared, too.

        Raises:
            StrategyError: If the pass has written a trained parameter. Also if it has written an undeclared frozen
                parameter through `data`, and this was seen only after the first pass.
        """
        if self._parts.changed():
            self._look()
        self._passes += 1
        marks = WriteMarks(self._named, not self._passes & (self._passes - 1))
        declared = WriteMarks([pair for pair in self._named if pair[0] in self._declared], True)
        yield
        counted, by_bits = marks.counted(), marks.by_bits()
        late = by_bits - counted - self._known if self._passes > 1 else set()
        for name, one in self._named:
            is_late = name in late and name not in self._declared
            if is_late or (one.requires_grad and name in counted | by_bits):
                refuse_write(name, one)
        self.frozen |= declared.by_bits() | self._known | counted | by_bits
        self._known |= by_bits - counted


class LoopBuffers:
    """The values with which a step begins, and the changes since.

    Args:
        module: The module.
        model: The buffers on which replicas agree.

    Attributes:
        writes: The watch over frozen parameters that forward passes write.
    """

    def __init__(self, module: torch.nn.Module, model: ModelBuffers) -> None:
        self._model = model
        self.writes = ForwardWatch(module, model.declared)
        self._masters: dict[str, torch.Tensor] = {}
        self.begin_with({})

    def begin_with(self, known: Mapping[str, torch.Tensor]) -> None:
        """Copy the buffers, to find changes later: the `known` value of a buffer, or else its present value."""
        buffers = [slot for slot in self._model.slots if not slot.is_parameter]
        self._masters = {slot.name: known.get(slot.name, slot.tensor.detach()).clone() for slot in buffers}

    def follow(self) -> None:
        """Find the buffers that the module has now. New ones count as changed."""
        known = {slot.name for slot in self._model.slots}
        self._model.follow()
        self.begin_with(self._masters)
        slots = enumerate(self._model.slots)
        self._model.moving |= {number for number, slot in slots if slot.name not in known and not slot.is_parameter}

    def has_changed(self, number: int, slot: Slot) -> bool:
        """Return whether forward passes have changed a buffer or a frozen parameter."""
        if slot.is_parameter:
            return slot.name in self.writes.frozen
        return number in self._model.moving or not have_same_bits(slot.tensor, self._masters[slot.name])

    def keep(self, values: dict[int, torch.Tensor]) -> None:
        """Put the values on which all replicas have agreed into buffers and frozen parameters, by their numbers."""
        self._model.keep(values)
        for slot in map(self._model.slots.__getitem__, values):
            if not slot.is_parameter:
                self._masters[slot.name] = slot.tensor.detach().clone()
        self.writes.frozen.clear()


class LoopAgreement:
    """The comparisons of one model.

    Args:
        module: The module.
        watch: The watch over it.
        replicas: The replicas of all instances.
        options: The options of the step.
    """

    def __init__(self, module: torch.nn.Module, watch: ModuleWatch, replicas: Replicas, options: TorchOptions) -> None:
        self._module, self._watch, self._replicas, self._options = module, watch, replicas, options
        self._writes_before = 0  # the count of writes when bits were last equal

    def insist_on_same_parts(self, slots: Sequence[Slot], new: Sequence[torch.Tensor]) -> None:
        """Compare parameters, buffers and options, and the values of new parameters. Collective.

        Raises:
            DisagreementError: On all instances, if they differ.
        """
        digests = {id(one): f", digest {digest_of(host_array(one))[0]:x}" for one in new}
        terms = {name: f"{_described(one)}{digests.get(id(one), '')}" for name, one in self._watch.named}
        buffers = {slot.name: f"buffer {slot.tensor.dtype}" for slot in slots}
        own = self._options
        options = {
            "seed": str(own.seed),
            "gradient_transfer_dtype": str(own.transfer.dtype),
            "missing_gradients": own.missing_gradients,
            "zero_weight": own.zero_weight,
        }
        insist_on_agreement(self._replicas, [options, terms, buffers])

    def have_same_bits(self) -> None:
        """Take it that all instances have the same bits now; unequal numbers of writes before do no harm."""
        self._writes_before = self._watch.writes

    def word(self, step: int) -> int:
        """Return the hash that travels with a step: it differs if instances have written parameters unequally often."""
        return word_of(step, self._watch.writes - self._writes_before)

    def compare_bits(self, step: int, words: tuple[float, float]) -> None:
        """Compare the bits of all parameters if the options or the words of all instances demand it. Collective if so.

        Args:
            step: The number of the step.
            words: The mean of the words and of their squares.

        Raises:
            DivergenceError: On all instances, if bits differ.
        """
        if settings_differ(*words) or (step and not step & (step - 1)):
            state = {name: host_array(one) for name, one in self._module.named_parameters()}
            insist_on_same_bits(self._replicas, host_arrays(state), step)
            self.have_same_bits()


def _described(parameter: torch.Tensor) -> str:
    where = "" if parameter.device.type == "cpu" else f" on {parameter.device.type}"
    return f"{parameter.dtype}{list(parameter.shape)} {'trained' if parameter.requires_grad else 'frozen'}{where}"


NAMES = ("active", "changed", "loss", "weight", "weighted")
"""The numbers that travel with gradients: whether the replica is still in its loop, whether it needs a new plan, its
loss if it is known, the weight of its losses, and whether they have weights."""


class AveragedParts:
    """The parts of a module on which replicas agree, which the program may change between two steps.

    Args:
        module: The module.
        replicas: The replicas of all instances.
        options: The options of the loop.
        hooks: The hooks on the gradients of the parameters, which follow changes of the module.

    Attributes:
        watch: The watch over the module.
        agreement: The comparisons with other instances.
        local: The warnings of gradients that are not averaged.
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
        self, module: torch.nn.Module, replicas: Replicas, options: TorchOptions, hooks: GradientHooks
    ) -> None:
        self._module, self._replicas, self._options, self._hooks = module, replicas, options, hooks
        self.watch = ModuleWatch(module)
        self.agreement = LoopAgreement(module, self.watch, replicas, options)
        self.local = LocalGradients()
        own, count = replicas.local_replicas.start, replicas.num_replicas_in_sync
        self.buffers = ModelBuffers(module, options.model_state_aggregation, count, own)
        self.changes = LoopBuffers(module, self.buffers)
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
    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters of the module, as the last forward pass has found them."""
        return [one for _, one in self.watch.named]

    @property
    def _trained(self) -> list[tuple[str, torch.nn.Parameter]]:
        """The parameters that are trained now or that the plan has: a layer may be frozen for a while."""
        return [(name, one) for name, one in self.watch.named if one.requires_grad or id(one) in self.numbers]

    @property
    def plan(self) -> TorchGradientPlan | None:
        """The plan of the gradients; None before the first one."""
        return None if self.exchange is None else self.exchange.plan

    # ---- agreement with the other instances

    def begin_alike(self, root: int) -> None:
        """Take over the parameters and buffers of the instance `root`. Collective."""
        named = [*self._module.named_parameters(), *self._module.named_buffers()]
        take_over(named, received_tensors(named, self._replicas.communicator, root))
        self.known = {id(one) for _, one in self.watch.named}
        self.changes.begin_with({})
        self.agreement.have_same_bits()

    def insist_on_agreement(self, new: Sequence[torch.Tensor]) -> None:
        """Compare the averaged parameters, and the values of new ones, with the other instances. Collective."""
        self.agreement.insist_on_same_parts(self.buffers.slots, new)
        self.known = {id(one) for _, one in self.watch.named}

    def take_order(self) -> None:
        """Give the parts of the module the order that they have on the first instance. Collective."""
        put_in_order(self._module, told_order(self._replicas, order_of(self._module)))
        self._follow_module()

    def plan_anew(self) -> None:
        """Make a plan for the parameters that are trained now. Collective."""
        refuse_modules(self._module)
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
        self.local.follow(self.named)
        self.is_behind = False
        self.agreement.have_same_bits()
        self.slots = self.buffers.slots
        self.exchange = self._exchange_of(tuple(Parameter.of(*one) for one in self.named))
        self.leaves_early = self.exchange.plan.is_cut and self._replicas.num_replicas_in_sync > 1

    @property
    def _obstacle(self) -> str:
        """The reason why gradients cannot stay on a device; "" if they can."""
        if self._options.stream_gradients:
            return "gradients on a device are exchanged when the backward pass has ended; leave stream_gradients out"
        return ""

    def _exchange_of(self, parameters: tuple[Parameter, ...]) -> GradientExchange:
        """Return the exchange for these parameters. Collective."""
        communicator, count = self._replicas.communicator, self._replicas.num_replicas_in_sync
        title = "gradients" if self.number == 1 else f"gradients of model {self.number}"
        plan = TorchGradientPlan(parameters, self._options.transfer, title=title)
        is_one_each = 1 < count == communicator.size
        path = path_of_loops(self._replicas, self.device, self._obstacle) if is_one_each else None
        if path is not None:
            return DeviceExchange(plan, NAMES, path, ReplicaMemory(self.device), communicator)
        tail, local = Tail.size(len(NAMES), len(parameters), len(self.buffers.slots)), self._replicas.local_replicas
        whole = replace(plan, streams=self._options.streams_over(self._replicas), tail=tail)
        rows: list[dict[int, GroupRow]] = [{} for _ in local]
        return HostExchange(whole, NAMES, communicator, count, rows, communicator.allocate, not whole.is_cut)

    # ---- changes of the module

    def follow(self) -> bool:
        """Find changes to the module before a forward pass; return False if tensors stand in for its parameters."""
        if not self.watch.has_other_parts:
            return True
        if self.watch.is_swapped:
            if self._replicas.num_replicas_in_sync > 1:
                self.local.warn_of_others()
            return False
        self.watch.look()
        self.is_behind = True
        self._hooks.follow(self.watch.named)
        return True

    def look_again(self) -> None:
        """Compare the module with the plan, and record whether a new plan is needed.

        Raises:
            StrategyError: If a parameter is new, and its gradient was missed.
        """
        if self.watch.has_other_parts:
            self.watch.look()
            unknown = [name for name, one in self.watch.named if one not in self._hooks and one.requires_grad]
            if unknown:
                raise StrategyError(
                    f"{unknown[0]} is new in the module, and its gradient was missed in a backward pass that "
                    "does not come from the DistributedModel; call the DistributedModel, not the module in it"
                )
            self.is_behind = True
        if self.watch.has_other_kinds:
            self.watch.look()
            self.is_behind = True
        numbers = self.numbers
        if any(one.requires_grad and id(one) not in numbers for _, one in self.watch.named):
            self.is_behind = True

    # ---- what is refused

    def refuse_gradients_that_are_gone(self, came: Container[int]) -> None:
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

    def refuse_weights(self) -> None:
        """Raise if weighted gradients would exceed the range of the dtype in which they travel.

        Raises:
            ValueError: If a gradient travels as float16.
        """
        for name, one in self._trained:
            refuse_float16(name, self._options.transfer.dtype_of(dtype_of(one)))
