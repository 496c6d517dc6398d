"""A module in a training loop of the program, like PyTorch's DistributedDataParallel: passes, and turns of replicas."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from typing import NoReturn, SupportsIndex

import numpy as np
import torch
from torch.jit import optimized_execution

from collectives.instruments import EXCHANGE, FORWARD_BACKWARD
from popdist.switches import require_switches
from strategies.argument_checks import at_least, positive
from strategies.core.journal import Recorded
from strategies.core.options import ERROR
from strategies.core.survival import lost_with_an_instance, meet, surviving, warn_of_loss
from strategies.errors import StrategyError
from strategies.strategy import Strategy
from strategies.torch.data import copied, parts_of, tensors_of
from strategies.torch.distributed_model.averaging import GradientAveraging, raise_on_spare
from strategies.torch.distributed_model.passes import MeanPassResult, PassResult
from strategies.torch.options import (
    Aggregation,
    TorchOptions,
    check_loss,
    is_asked_for,
    number_of,
    one_of,
    outcome_of,
    states_to,
    weighted_value,
)
from strategies.torch.replicas.attributes import Attributes, attributes_of
from strategies.torch.replicas.generators import has_baton
from strategies.torch.replicas.gradient_map import groups_of
from strategies.torch.replicas.guard import check_repetition
from strategies.torch.replicas.module_parts import check_not_compiled, stop_profiling
from strategies.torch.replicas.sync_batch_norm import check_no_sync_layers, sync_layers_of
from strategies.torch.replicas.turns import Gradients, ReplicaTurns, TurnsOfStep
from strategies.torch.tensors import keep_freed_memory, use_deterministic_operations
from strategies.torch.training import check_module
from strategies.typing import Batch, Number, Tree
from strategies.values import Outcome

LossOfBatch = Callable[[Batch], torch.Tensor | Outcome]
"""(rows of one replica) -> loss, or `Outcome` with the loss and its weight."""

_Begin = Mapping[torch.nn.Parameter, torch.Tensor | None]
"""The gradients with which each replica begins."""


class DistributedModel(torch.nn.Module):
    """A module whose gradients are averaged over all replicas in every backward pass.

        model = strategies.torch.DistributedModel(module, strategy)
        for x, y in loader:                       # this replica's rows
            optimizer.zero_grad()
            loss_function(model(x), y).backward()  # afterwards every grad is the mean over all replicas
            optimizer.step()

    `loss.backward()` is the pass of one replica, so the job needs one instance for each replica, and if an instance is
    lost, it ends. With `backward(loss_fn, batch)` an instance may drive several replicas, and the job survives.

    With the same rows, the trained parameters have the same bits as with `strategies.torch.Trainer` on any number of
    instances. Random numbers of a forward pass depend on `seed`, the replica, and the number of earlier backward
    passes.

    The constructor is a collective call: all instances begin with the parameters and buffers of instance 0, and put the
    parts of the module in its order. Backward passes are collective calls, except in `no_sync`.

    Args:
        module: The module, on the CPU or on one GPU. Its gradients stay on the GPU if the exchange of the job can use
            them there; see gpus.md. The optimizer must hold the parameters of this module.
        strategy: The strategy whose replicas train.
        seed: The seed of the random numbers in forward passes.
        gradient_transfer_dtype: The dtype in which gradients travel, float16 or bfloat16; None for their own dtypes.
        model_state_aggregation: As in `TorchOptions`. Buffers are agreed on at the end of each backward pass.
        intra_op_threads: PyTorch's number of threads within an operation; None leaves it as it is.
        stream_gradients: Whether gradients are exchanged while the backward pass runs, as in `TorchOptions`. Gradients
            that stay on a device are exchanged at the end of the pass.
        missing_gradients: As in `TorchOptions`: "zero" counts a gradient that only some replicas have as zeros on the
            others.
        zero_weight: The end of a step whose losses all have the weight 0. "error": it raises `ZeroWeightError`. "skip":
            every `grad` of the module is None then, so that optimizers of `torch.optim` change no parameter.

    Attributes:
        module: The module that was given.

    Raises:
        StrategyError: If the module cannot be trained here.
    """

    averages_gradients = True

    def __init__(
        self,
        module: torch.nn.Module,
        strategy: Strategy,
        *,
        seed: int = 0,
        gradient_transfer_dtype: torch.dtype | str | None = None,
        model_state_aggregation: Aggregation = None,
        intra_op_threads: int | None = 1,
        stream_gradients: bool | None = None,
        missing_gradients: str = ERROR,
        zero_weight: str = ERROR,
    ) -> None:
        super().__init__()
        options = TorchOptions(
            seed,
            gradient_transfer_dtype=gradient_transfer_dtype,
            model_state_aggregation=model_state_aggregation,
            stream_gradients=stream_gradients,
            missing_gradients=missing_gradients,
            zero_weight=zero_weight,
        )
        check_module(module)
        stop_profiling(module)
        if grouped := [name for name, parameter in module.named_parameters() if groups_of(parameter) is not None]:
            raise StrategyError(
                f"{grouped[0]} has a row for each group of replicas, but a DistributedModel is a single replica; use "
                "strategies.torch.Trainer, whose replicas are copies of the module"
            )
        device = next(module.parameters()).device
        if device.type != "cpu" and (layers := sync_layers_of(module)):
            raise StrategyError(
                f"SyncBatchNorm {next(iter(layers))!r} is on {device}, but a DistributedModel adds its statistics on "
                "the host; use BatchNorm, or move the module to the CPU"
            )
        if device.type == "cuda" and strategy.defaults.deterministic:
            use_deterministic_operations(os.environ)
        if intra_op_threads is not None:
            torch.set_num_threads(intra_op_threads)
        keep_freed_memory()
        self.module = module
        self._strategy = strategy
        self._options = options
        self._connect()
        self._averaging.start()

    def _connect(self) -> None:
        self._averaging = GradientAveraging(self.module, self._strategy.replicas, self._options)
        self._turns = ReplicaBackward(self._averaging)

    @property
    def replica(self) -> int:
        """The replica for which the module computes: in the `loss_fn` of `backward`, that of the rows."""
        return self._averaging.loop.replica

    def compute_with(self, attributes: Attributes) -> None:
        """Let a front end of this model say which attributes of the module each replica has for itself."""
        self._turns.attributes = attributes

    @property
    def steps_made(self) -> int:
        """The number of averaged backward passes so far. Set it to go on with the random numbers of a later step."""
        return self._averaging.loop.step

    @steps_made.setter
    def steps_made(self, number: int) -> None:
        self._averaging.loop.step = at_least(0, "steps_made", number)

    def backward(self, loss_fn: LossOfBatch, batch: Batch, micro_batches: int = 1) -> torch.Tensor:
        """Compute the gradients of every local replica, and average them over all replicas. Collective.

            for batch in dataset.epoch(epoch):  # of strategies.torch.distribute_dataset
                optimizer.zero_grad()
                loss = model.backward(lambda rows: loss_function(model(rows["x"]), rows["y"]), batch)
                optimizer.step()

        An instance may drive several replicas, one after another, and go on with the replicas of a lost instance. It
        then calls `loss_fn` again, on rows that the lost instance had read. So `loss_fn` must depend on nothing that
        it changes itself, such as a counter. All that follows, as `optimizer.step()`, happens once for each step.

        Args:
            loss_fn: `(batch) -> loss`, or `-> strategies.Outcome(loss, weight=...)`, for the rows of a micro-batch of
                one replica. It calls this model.
            batch: The batch of this instance, with the rows of the local replicas one after another.
            micro_batches: The number of micro-batches into which each replica's rows are cut. Their gradients are
                added, so `loss_fn` divides the loss by this number. If losses have weights, gradients are weighted
                means over all replicas and micro-batches, and nothing is divided.

        Returns:
            The mean over all replicas of the sum of a replica's losses, float32, without a graph; the weighted mean of
            the losses if they have weights.

        Raises:
            StrategyError: Inside `no_sync` or after a pass in it. If an instance has several replicas and the module
                has a SyncBatchNorm. If a gradient exists on some replicas only, unless `missing_gradients` is "zero".
                If a gradient is gone after the pass. If a forward pass changes the parts of the module. On all
                instances, if a replica that computes again in step 1, 2, 4, 8 and so on gets another loss, gradient or
                buffer.
            TypeError: If the loss is no scalar tensor.
            ValueError: If the batch cannot be divided evenly among the local replicas.
            WeightError: On all instances, if weights of losses have no mean; see `weighted_backward`.
        """
        check_not_compiled()
        return self._turns.backward(loss_fn, batch, positive("micro_batches", micro_batches))

    def weighted_backward(
        self, loss: torch.Tensor, weight: Number | None = None, *, retain_graph: bool = False
    ) -> None:
        """Run the backward pass of a loss that counts with a weight, in place of `loss.backward()`.

            tokens = (labels != -100).sum()
            loss = torch.nn.functional.cross_entropy(model(inputs), labels, ignore_index=-100)  # mean over tokens
            model.weighted_backward(loss, tokens)
            optimizer.step()

        Afterwards every `grad` is the weighted mean over all replicas, and over the micro-batches inside `no_sync`:
        `sum(weight * gradient) / sum(weight)`. Do not divide the loss by the number of micro-batches. A loss of the
        weight 0 may be NaN. The weight holds for the whole loss, and for all models that it goes through.

        Args:
            loss: A floating-point scalar, also one that a `GradScaler` has scaled.
            weight: A finite number of at least 0, or a tensor with one, such as the number of tokens; see
                `strategies.Outcome`. None: the weight that the module has stated with `strategies.torch.loss_weight`.
            retain_graph: As in `Tensor.backward`.

        Raises:
            TypeError: If the loss or the weight is no scalar.
            ValueError: If there is no weight, or gradients travel as float16.
            StrategyError: If some backward passes of a step have no weight, gradients of an earlier step are left, or
                the program has changed gradients since the last pass of this step.
            WeightError: On all instances, if a weight is negative or not finite.
            ZeroWeightError: On all instances, if all weights are 0, unless `zero_weight` is "skip". Gradients are 0
                then, and buffers have changed.
        """
        check_not_compiled()
        require_switches(retain_graph=retain_graph)
        check_loss(loss)
        stated = self._averaging.loop.weights.stated
        given = [*stated] if weight is None else [weight]
        stated.clear()  # the next pass states its own, even if this one fails
        if (found := one_of(given, "give the weight: model.weighted_backward(loss, weight)")) is None:
            raise ValueError(
                "the loss has no weight; give it, as in model.weighted_backward(loss, tokens), or let the module state "
                "it with strategies.torch.loss_weight, in training mode"
            )
        self._averaging.weighted_backward(loss, number_of(found), retain_graph)

    def forward(self, *arguments: Tree, **named: Tree) -> Tree:
        """Return the module's outputs; the forward pass draws random numbers from the replica's generator."""
        check_not_compiled()
        averaging = self._averaging
        is_followed = averaging.follow()
        synchronised = averaging.layers.entered(averaging.layers.replicas.start)
        draws = averaging.loop.forward_pass(self.training, averaging.device)
        if not is_followed:
            with synchronised, draws:
                return self.module(*arguments, **named)
        is_again = torch._C._current_graph_task_id() >= 0  # a checkpoint recomputes this pass
        collects = self.training and torch.is_grad_enabled() and not is_again and not is_asked_for()
        stating = states_to(averaging.loop.weights.stated) if collects else nullcontext()
        watching = nullcontext() if has_baton() else averaging.changes.watching()
        with synchronised, draws, optimized_execution(False), watching, stating:
            outputs = self.module(*arguments, **named)
        averaging.watch_outputs(outputs)
        return outputs

    def compile(self, *arguments: object, **named: object) -> None:
        """Compile the wrapped module. The code around it, which exchanges its gradients, is not compiled."""
        self.module.compile(*arguments, **named)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally, without an exchange, in the backward passes of this context.

        Use it for all micro-batches but the last:

            with model.no_sync():
                for x, y in first_micro_batches:
                    loss_function(model(x), y).backward()
            loss_function(model(last_x), last_y).backward()  # averages the sums
        """
        loop = self._averaging.loop
        before, loop.syncs = loop.syncs, False
        try:
            yield
        finally:
            loop.syncs = before

    @contextmanager
    def join(self) -> Iterator[None]:
        """Allow instances to have different numbers of batches in the loop of this context. Its end is collective.

            with model.join():
                for x, y in loader: ...

        An instance whose batches have ended takes part in the other instances' backward passes with gradients of zero:
        means are still over all replicas. At the end all instances take the parameters and buffers of an instance that
        made the most steps; the optimizers of instances that ended earlier have made fewer steps. Without `join`, an
        instance that ends too early is an error on all instances.

        Raises:
            StrategyError: If the module has a SyncBatchNorm, for which all replicas need rows, or if an instance has
                several replicas.
        """
        averaging = self._averaging
        averaging.check_one_replica()
        if not averaging.is_alone:
            check_no_sync_layers(self.module)
        yield
        if averaging.is_alone:
            return
        while not averaging.join_once():
            pass
        steps = self._strategy.communicator.all_gather(np.array(averaging.loop.step), name="steps made")
        averaging.begin_alike(int(steps.argmax()))
        averaging.loop.step = int(steps.max())

    # ---- copies

    def __deepcopy__(self, memo: dict[int, object]) -> DistributedModel:
        """Copy the module. The copy's exchange is new, and first contacts the other instances in a backward pass."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        shared = (self._strategy, self._options)
        memo.update({id(one): one for one in shared})
        own = {name: value for name, value in vars(self).items() if name not in ("_averaging", "_turns")}
        copied.__dict__.update(copy.deepcopy(own, memo))
        copied._connect()
        copied.steps_made = self.steps_made
        return copied

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to pickle the model, which is connected to other processes.

        Raises:
            StrategyError: Always.
        """
        raise StrategyError(
            "a DistributedModel is connected to the other instances of the job and cannot be written to a file; save "
            "model.module, or model.module.state_dict(), and construct a DistributedModel from the loaded module"
        )


class ReplicaBackward:
    """The local replicas of a `DistributedModel`, which take turns with its module.

    Args:
        averaging: The averaging of the module's gradients.

    Attributes:
        attributes: The attributes of the module, of which each replica has its own.
    """

    def __init__(self, averaging: GradientAveraging) -> None:
        self._averaging, self._module, self._replicas = averaging, averaging.module, averaging.replicas
        self.attributes = attributes_of(self._module)
        self._has_warned = False
        self._key: object = None
        self._first_step = 0

    @cached_property
    def turns(self) -> ReplicaTurns[PassResult]:
        """The turns, which only `DistributedModel.backward` needs."""
        averaging, count = self._averaging, self._replicas.num_replicas_in_sync
        return ReplicaTurns(self._module, averaging.watch, averaging.buffers, self.attributes, count)

    def backward(self, loss_fn: LossOfBatch, batch: Batch, micro_batches: int) -> torch.Tensor:
        """Let every local replica compute, and average the gradients; see `DistributedModel.backward`. Collective."""
        replicas, averaging = self._replicas, self._averaging
        batch = replicas.up_to_date(batch)
        if not averaging.loop.syncs or averaging.loop.carried:
            raise StrategyError(
                "model.backward computes a whole step of each replica, and backward passes inside no_sync cannot be a "
                "part of it; use model.backward(loss_fn, batch, micro_batches=2)"
            )
        self._warn(batch)
        begin = {one: one.grad for one in self._module.parameters()}
        attempts = itertools.count()

        def attempt() -> MeanPassResult:
            averaging.connect()
            local = len(replicas.local_replicas)
            if local > 1 and (layers := sync_layers_of(self._module)):
                raise StrategyError(
                    f"SyncBatchNorm {next(iter(layers))!r} needs all replicas at the same time, but the {local} "
                    "replicas of this instance compute one after another; use BatchNorm, or strategies.torch.Trainer"
                )
            replicas.sharding.check_batch(batch)
            with replicas.instruments.during[FORWARD_BACKWARD]:
                turns = self._taken(loss_fn, batch, micro_batches, begin, is_repetition=next(attempts) > 0)
            with replicas.instruments.during[EXCHANGE]:
                averaging.look_again()
                means = averaging.average(turns)
                self._give(means, begin)
                return means.kept() if replicas.can_carry_on else means

        def catch_up() -> MeanPassResult | None:
            nonlocal batch
            if not (meeting := meet(replicas)).is_late:
                batch = replicas.replicas_batch(batch)
                return None
            means = averaging.shared(None, meeting.newest)  # of a step that the others have completed
            self._give(means.kept(), begin)
            averaging.changes.keep(dict(means.buffers))
            return means

        recorded = Recorded[MeanPassResult]("backward pass of all replicas", lambda means: bool, raise_on_spare)
        try:
            means = surviving(replicas, attempt, catch_up, averaging.shared, recorded)
        except BaseException:
            for parameter, before in begin.items():
                parameter.grad = before
            raise
        averaging.loop.next_step()
        averaging.end_step(means.weight, averaging.loop.step - 1)
        self.turns.applied()
        return torch.tensor(means.loss)

    def _give(self, means: MeanPassResult, begin: _Begin) -> None:
        for name, parameter in self._module.named_parameters():
            parameter.grad = means.gradients.get(name, begin[parameter])

    # ---- one replica after another

    def _taken(
        self, loss_fn: LossOfBatch, batch: Batch, micro_batches: int, begin: _Begin, is_repetition: bool
    ) -> list[PassResult]:
        """Let the local replicas compute, each with the gradients of the beginning."""
        averaging, replicas, turns = self._averaging, self._replicas, self.turns
        local, step = replicas.local_replicas, averaging.loop.step
        parts = parts_of(tensors_of(batch), len(local) * micro_batches)
        losses = [partial(loss_fn, part) for part in parts]
        averaging.follow()
        if averaging.is_behind:
            averaging.changes.follow()
            self.attributes.follow()
        key = replicas.communicator, local
        if self._key != key or averaging.is_behind:  # it is not known what other instances or parts write
            self._key, self._first_step = key, step
        of_step = TurnsOfStep(step, step - self._first_step + 1, local, averaging.device, is_repetition)
        found: list[PassResult] = []
        every = [
            partial(self._turn, replica, losses[place * micro_batches :][:micro_batches], begin)
            for place, replica in enumerate(local)
        ]
        is_repeated = turns.repeats_in(of_step)
        first = [partial(loss_fn, part) for part in copied(parts[:micro_batches])] if is_repeated else []
        again = partial(self._turn, local.start, first, begin)
        turns.run(of_step, every, again, lambda place, turn, gradients: found.append(turn))
        if is_repeated:
            check_repetition(replicas, turns.guard.found, step)
        return found

    def _turn(
        self, replica: int, losses: Sequence[Callable[[], object]], begin: _Begin
    ) -> tuple[PassResult, Gradients]:
        averaging = self._averaging
        loop, device = averaging.loop, averaging.device
        for parameter, gradient in begin.items():
            parameter.grad = None if gradient is None else gradient.detach().clone()
        with self.turns.of(replica, device), loop.turn(replica), torch.enable_grad():
            of_losses, total = [], 0.0
            for number, loss in enumerate(losses):
                loop.seed_micro_batch(number, device)
                value, weighted = self._backward(loss)
                of_losses.append(value)
                total += weighted
            gradients, weight = averaging.gradients_of(loop.carried), loop.weights.total
            changed, slots = self.turns.ended(replica)
        for parameter in begin:
            parameter.grad = None
        changes = {slot.name: float(one) for slot, one in zip(slots, changed, strict=True)}
        trained = [gradients.get(name) for name, one in averaging.watch.named if one.requires_grad]
        return PassResult(total, gradients, slots, changes, of_losses, weight), trained

    def _backward(self, compute: Callable[[], object]) -> tuple[torch.Tensor, float]:
        """Make a backward pass, and return its loss, and the same times its weight if it has one."""
        outcome = outcome_of(compute)
        loss, weight = outcome.loss, outcome.weight
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = f" of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
            raise TypeError(f"loss_fn has returned a {type(loss).__name__}{shape}; return the loss, a scalar tensor")
        if outcome.metrics or outcome.outputs is not None:
            raise TypeError("loss_fn has returned metrics or outputs, which a loop can keep by itself; return the loss")
        if weight is None:
            loss.backward()
        else:
            self._averaging.weighted_backward(loss, weight)
        return loss.detach(), weighted_value(float(loss.detach()), weight)

    def _warn(self, batch: Batch) -> None:
        """Warn once if the others cannot go on without a lost instance."""
        if self._has_warned:
            return
        self._has_warned = True
        reason = lost_with_an_instance(False, self._replicas.dataset_of(batch))
        if layers := sync_layers_of(self._module):
            reason = f"SyncBatchNorm {next(iter(layers))!r} needs one replica on each instance"
        warn_of_loss(self._replicas, reason)
