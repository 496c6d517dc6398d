"""A module in a loop of the program's own, in the manner of PyTorch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.jit import optimized_execution

from strategies.errors import StrategyError
from strategies.replicas.membership import warn_of_loss
from strategies.roles import Tree
from strategies.strategy import Strategy
from strategies.torch.allocator import keep_freed_memory
from strategies.torch.contribution import Contribution
from strategies.torch.gradient_exchange import GradientExchange, Tail
from strategies.torch.gradient_plan import GradientPlan, Parameter
from strategies.torch.model_buffers import ModelBuffers
from strategies.torch.options import Aggregation, TorchOptions
from strategies.torch.parameter_writes import ForwardWatch
from strategies.torch.randomness import drawing_from, seed_of
from strategies.torch.replica_groups import groups_of
from strategies.torch.tensors import dtype_of
from strategies.torch.training import receive_into, refuse_modules


class DistributedModel(torch.nn.Module):
    """Averages the gradients of a module over all instances during every backward pass; one replica per instance.

        model = strategies.torch.DistributedModel(module, strategy)
        for x, y in loader:                       # this replica's rows
            optimizer.zero_grad()
            loss_function(model(x), y).backward()  # afterwards every grad is the mean over all replicas
            optimizer.step()

    With the same rows it has the bits of `strategies.torch.Trainer`, however many instances that runs on: random
    numbers of the forward pass come from `seed`, the replica, and the number of backward passes before.

    To make one is a collective call: all instances begin with the parameters and buffers of instance 0. Backward passes
    are collective calls, but for those in `no_sync`. An instance that is lost ends the job.

    Args:
        module: on the CPU; its parameters are those of the optimizer.
        strategy: with one replica per instance.
        seed: of the random numbers in forward passes.
        gradient_transfer_dtype: float16 or bfloat16: how gradients travel; None for their own dtypes.
        model_state_aggregation: see `TorchOptions`; buffers are agreed on at the end of each backward pass.
        intra_op_threads: of this thread, see `TorchOptions`; None leaves them as they are.
        stream_gradients: see `TorchOptions`; otherwise gradients are exchanged at the end of the backward pass.

    Attributes:
        module: see above.

    Raises:
        StrategyError: if the strategy has several replicas per instance, or the module cannot be trained here.
    """

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
    ) -> None:
        super().__init__()
        options = TorchOptions(
            seed,
            gradient_transfer_dtype=gradient_transfer_dtype,
            model_state_aggregation=model_state_aggregation,
            stream_gradients=stream_gradients,
        )
        if options.transfer.is_quantised:
            raise StrategyError(
                "int8 gradients have residuals, which only strategies.torch.Trainer keeps; use bfloat16"
            )
        local = len(strategy.replicas.local_replicas)
        if local > 1:
            raise StrategyError(
                f"this instance drives {local} replicas, and a loop of the program's own is one of them; start as many "
                "instances as replicas, or use strategies.torch.Trainer, which drives several"
            )
        refuse_modules(module)
        if grouped := [name for name, parameter in module.named_parameters() if groups_of(parameter) is not None]:
            raise StrategyError(
                f"groups of replicas have rows of {grouped[0]}, and here the module is the replica itself; use "
                "strategies.torch.Trainer, whose replicas are copies of the module"
            )
        if intra_op_threads is not None:
            torch.set_num_threads(intra_op_threads)
        keep_freed_memory()
        self.module = module
        self._writes = ForwardWatch(module)
        self._strategy = strategy
        self._options = options
        self._replica = strategy.replicas.local_replicas.start
        self._loop = _Loop(strategy.replicas.instruments.step_begins)
        warn_of_loss(
            strategy.replicas,
            "a loop of the program's own is one replica, and who is left cannot carry the one of an instance besides",
        )
        self._streams = strategy.replicas.streams_gradients if stream_gradients is None else stream_gradients
        self._is_alone = strategy.replicas.num_replicas_in_sync == 1
        self._model_buffers = ModelBuffers(
            module, model_state_aggregation, strategy.replicas.num_replicas_in_sync, self._replica
        )
        self._begin_alike(0)
        self._masters = [one.clone() for one in self._model_buffers.masters]
        self._named = [(name, one) for name, one in module.named_parameters() if one.requires_grad]
        self._exchange = self._new_exchange()
        self._contribution = Contribution(self._exchange.plan)
        self._thread = ThreadPoolExecutor(1, "gradients")
        take = self._leaves if self._exchange.plan.is_cut else self._arrived
        for number, (_, parameter) in enumerate(self._named):
            parameter.register_post_accumulate_grad_hook(partial(take, number))

    def forward(self, *arguments: Tree, **named: Tree) -> Tree:
        """What the module returns; random numbers are drawn from the replica's generator."""
        seed = seed_of(self._options.seed, self._replica, self._loop.step, self._loop.micro_batch)
        if self._loop.round is not None and torch._C._current_graph_task_id() < 0:
            self._loop.round = None  # its backward pass has failed half-way, and this is not one that computes again
        if torch.is_grad_enabled() and self.training:
            if not self._loop.micro_batch:
                self._loop.begins(self._loop.step)
            self._loop.micro_batch += 1
        with drawing_from(seed), optimized_execution(False), self._writes.watching():
            return self.module(*arguments, **named)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here only add to the gradients of this instance: for all micro-batches but the last."""
        before, self._loop.syncs = self._loop.syncs, False
        try:
            yield
        finally:
            self._loop.syncs = before

    @contextmanager
    def join(self) -> Iterator[None]:
        """A loop in which instances may have different numbers of batches; a collective call at its end.

        Who comes to its end takes part in the backward passes of the others with gradients of zero, so that means are
        still over all replicas. At the end all have the parameters and buffers of an instance that made most steps;
        the optimizers of the others are behind. Without it instances that end too early are an error on all.
        """
        yield
        if self._is_alone:
            return
        while not self._join_once():
            pass
        steps = self._strategy.communicator.all_gather(np.array(self._loop.step), name="steps made")
        self._begin_alike(int(steps.argmax()))
        self._loop.step = int(steps.max())

    # ---- a backward pass

    def _arrived(self, number: int, parameter: torch.Tensor) -> None:
        """A gradient is complete: called by autograd. It is taken when all are, in a part of the time."""
        loop = self._loop
        if loop.syncs:
            (loop.round or self._begin_round()).has_come[number] = True

    def _leaves(self, number: int, parameter: torch.Tensor) -> None:
        """A gradient is complete, and may leave at once: called by autograd."""
        loop = self._loop
        if not loop.syncs:
            return
        round_ = loop.round or self._begin_round()
        if round_.has_come[number]:
            raise StrategyError(
                f"the gradient of {self._named[number][0]} has come twice in one backward pass, as of parameters in "
                "several reentrant checkpoints; use checkpoint(..., use_reentrant=False), or stream_gradients=False"
            )
        round_.has_come[number] = True
        if not self._is_alone:
            self._take(round_, number, parameter.grad)

    def _begin_round(self) -> _Round:
        self._loop.round = round_ = _Round(self._exchange.plan)
        end = self._loop.next_step if self._is_alone else self._end
        torch.autograd.Variable._execution_engine.queue_callback(end)
        return round_

    def _take(self, round_: _Round, number: int, gradient: torch.Tensor | None) -> None:
        self._contribution.take(number, gradient)
        for bucket in round_.ready_after(number):
            round_.begun.append(self._thread.submit(self._reduce, bucket))

    def _reduce(self, bucket: int) -> None:
        self._exchange.reduce(bucket, [[array] for array in self._contribution.arrays(bucket)])

    def _end(self) -> None:
        """The backward pass has ended: what has not left yet, the tail, and the means."""
        round_, self._loop.round = self._loop.round, None
        assert round_ is not None
        self._finish(round_, is_active=True)
        self._loop.next_step()

    def _take_rest(self, round_: _Round, gradients: Sequence[torch.Tensor | None]) -> None:
        if not self._exchange.plan.is_cut:
            self._contribution.take_all(gradients)
            return
        for number, has_come in enumerate(round_.has_come):
            if not has_come:
                self._take(round_, number, None)

    def _finish(self, round_: _Round, is_active: bool) -> Tail:
        changes = [
            float(number in self._model_buffers.moving or not torch.equal(slot.tensor, master))
            for number, (slot, master) in enumerate(zip(self._model_buffers.slots, self._masters, strict=True))
        ]
        gradients = [
            parameter.grad if has_come else None
            for (_, parameter), has_come in zip(self._named, round_.has_come, strict=True)
        ]
        self._take_rest(round_, gradients)
        self._contribution.set_tail(
            [float(is_active), 0.0, *(float(gradient is not None) for gradient in gradients), *changes]
        )
        for future in round_.begun:
            future.result()
        self._reduce(len(self._exchange.plan.members) - 1)
        tail = self._exchange.tail
        self._contribution.give_back()
        self._refuse_gradients_of_some(tail, gradients)
        self._exchange.give(gradients)
        self._agree_on_buffers(np.flatnonzero(tail.has_changed).tolist())
        return tail

    def _join_once(self) -> bool:
        """Take part in a backward pass of others; whether there was none."""
        round_ = _Round(self._exchange.plan)
        return not self._finish(round_, is_active=False).metrics[0]

    def _agree_on_buffers(self, changed: Sequence[int]) -> None:
        if changed:
            values = self._model_buffers.agreed(changed, [self._model_buffers.slots], self._strategy.replicas)
            self._model_buffers.keep(values)
            for number in values:
                self._masters[number].copy_(self._model_buffers.masters[number])

    def _refuse_gradients_of_some(self, tail: Tail, gradients: Sequence[torch.Tensor | None]) -> None:
        active = float(tail.metrics[0])
        some = np.flatnonzero((tail.has_gradient > 0) & (tail.has_gradient < active))
        if not some.size:
            return
        number = int(some[0])
        own = np.array(gradients[number] is None)
        lacking = self._strategy.communicator.all_gather(own, name="who lacks a gradient")
        name, replicas = self._named[number][0], np.flatnonzero(lacking).tolist()
        raise StrategyError(
            f"{name} has no gradient on the replicas {replicas}, and one on the others; let the loss of every replica "
            "depend on it, if only by 0 * parameter.sum()"
        )

    # ---- together with the others

    def _begin_alike(self, root: int) -> None:
        """The parameters and buffers of an instance, everywhere; a collective call."""
        broadcast = self._strategy.communicator.broadcast
        for name, tensor in [*self.module.named_parameters(), *self.module.named_buffers()]:
            receive_into(tensor, partial(broadcast, root=root, name=name))

    def _new_exchange(self) -> GradientExchange:
        parameters = tuple(Parameter(name, tuple(one.shape), dtype_of(one)) for name, one in self._named)
        tail = Tail.size(1, len(parameters), len(self._model_buffers.slots))
        plan = GradientPlan(parameters, self._options.transfer, streams=self._streams, tail=tail)
        replicas = self._strategy.replicas
        count = replicas.num_replicas_in_sync
        return GradientExchange(plan, ("active",), replicas.communicator, count, is_private=False)


@dataclass
class _Loop:
    """Where the program's loop is. Attributes of a module are slow to set, those of this are not.

    Attributes:
        begins: told the number of each step that begins.
        step: how many backward passes were made, of those that are synchronised.
        micro_batch: how many forward passes were made since.
        syncs: whether backward passes are synchronised.
        round: the backward pass that runs.
    """

    begins: Callable[[int], None]
    step: int = 0
    micro_batch: int = 0
    syncs: bool = True
    round: _Round | None = None

    def next_step(self) -> None:
        """A backward pass has ended."""
        self.step, self.micro_batch, self.round = self.step + 1, 0, None


class _Round:
    """One backward pass: which gradients have come.

    Args:
        plan: how they travel.

    Attributes:
        has_come: for each parameter.
        begun: the exchanges of gradients that leave one by one, in their order.
    """

    def __init__(self, plan: GradientPlan) -> None:
        self._plan = plan
        self._missing = [len(numbers) for numbers in plan.members]
        self._next = 0
        self.has_come = [False] * len(plan.parameters)
        self.begun: list[Future[Any]] = []

    def ready_after(self, number: int) -> list[int]:
        """A gradient was taken; the buckets to be exchanged now, in the same order on all instances.

        The last one is not among them: its tail is known at the end.
        """
        self._missing[self._plan.places[number].bucket] -= 1
        ready = []
        while self._next < len(self._missing) - 1 and not self._missing[self._next]:
            ready.append(self._next)
            self._next += 1
        return ready
