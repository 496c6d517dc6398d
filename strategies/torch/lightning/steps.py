"""The steps of an instance's replicas with one LightningModule, and their metrics and logged values."""

from __future__ import annotations

import inspect
import math
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TypeAlias, final

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import ParallelStrategy
from pytorch_lightning.utilities.data import extract_batch_size
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers.abstract import WrapperMetric

from strategies.errors import StrategyError
from strategies.strategy import Strategy
from strategies.torch.agreement import broadcast_object, gather_objects
from strategies.torch.distributed_model.model import DistributedModel
from strategies.torch.lightning.loader import ReplicaBatches, by_replica
from strategies.torch.options import number_of, one_of, states_to
from strategies.torch.replicas.attributes import Attributes
from strategies.torch.replicas.generators import drawing_from, seed_of
from strategies.torch.tensors import HOST
from strategies.typing import Batch, Tree
from strategies.values import Outcome

# ---- metrics

_COUNTERS = ("_update_count", "_computed", "_forward_cache")

State = Mapping[str, Tree]
"""The attributes of a metric that an update changes, by name."""


def metrics_of(module: pl.LightningModule, strategy: Strategy) -> list[ReplicaMetric]:
    """Give the metrics of a module a state for each local replica.

    Raises:
        StrategyError: If a metric keeps values that are no states.
    """
    for one in module.modules():
        if isinstance(one, WrapperMetric):
            raise StrategyError(
                f"{type(one).__name__} of torchmetrics keeps values that are no states, so they cannot be merged over "
                "replicas; use the metric in it, or log values with self.log, which averages them over replicas"
            )
        if isinstance(one, MetricCollection) and one._enable_compute_groups:
            raise StrategyError(
                "a MetricCollection with compute groups shares states between metrics, and replicas have states of "
                "their own; write MetricCollection(..., compute_groups=False)"
            )
    return [ReplicaMetric(one, strategy) for one in module.modules() if isinstance(one, Metric) and one._defaults]


@final
class ReplicaMetric:
    """A metric of a module, and its states for each local replica.

    While a replica runs the module, the metric has its state. `compute` outside of steps merges the states of all
    replicas of all instances, in the order of the replicas, and is then a collective call.

    Args:
        metric: The metric.
        strategy: The strategy of the replicas.
    """

    def __init__(self, metric: Metric, strategy: Strategy) -> None:
        self._metric, self._strategy = metric, strategy
        self._of: dict[int, State] = {}
        self._begun: dict[int, State | None] = {}  # when the replicas began their last steps
        self._left = 0  # the count of updates when the last replica ended
        self._is_running = False
        self._before = metric.distributed_available_fn
        # torchmetrics then merges the states before it computes. Copies of a module have the functions themselves.
        metric.distributed_available_fn = lambda: not self._is_running
        vars(metric)["_sync_dist"] = lambda *_, **__: self._merge()

    def disconnect(self) -> None:
        """Leave the metric as torchmetrics makes it, with the state of the last replica."""
        self._metric.distributed_available_fn = self._before
        vars(self._metric).pop("_sync_dist", None)

    def begin(self, replica: int, is_again: bool) -> None:
        """Give the metric the state of a replica; if `is_again`, that of the beginning of its last step."""
        self._forget_if_reset()
        self._is_running = True
        state = (self._begun if is_again else self._of).get(replica)
        self._begun[replica] = _copied(state)  # updates write to tensors and lists
        if state is None:
            for name, default in self._metric._defaults.items():
                if isinstance(default, list):
                    setattr(self._metric, name, [])  # `reset` would clear the list of another replica
            self._metric.reset()
        else:
            for name, value in state.items():
                setattr(self._metric, name, value)

    def end(self, replica: int) -> None:
        """Keep the state of a replica."""
        self._of[replica] = {name: getattr(self._metric, name) for name in (*self._metric._defaults, *_COUNTERS)}
        self._left = self._metric._update_count
        self._is_running = False

    def _forget_if_reset(self) -> None:
        """Drop the states if the program has reset the metric since the last replica ended."""
        count = self._metric._update_count
        if count not in (0, self._left):
            raise StrategyError(
                f"{type(self._metric).__name__} was updated outside of a step, where there is no replica; update it in "
                "training_step, validation_step or test_step"
            )
        if count != self._left:
            self._of, self._left = {}, 0

    def _merge(self) -> None:
        """Merge the states of all replicas into the metric. Collective."""
        self._forget_if_reset()
        metric = self._metric
        own = {replica: {name: state[name] for name in metric._defaults} for replica, state in self._of.items()}
        name = f"states of {type(metric).__name__}"
        merged = ChainMap(*gather_objects(self._strategy.communicator, _moved(own, HOST), name))
        in_order = [merged[replica] for replica in sorted(merged)]
        for name, reduction in metric._reductions.items() if in_order else ():
            values = [state[name] for state in in_order]
            is_tensor = isinstance(values[0], torch.Tensor)
            found: Tree = torch.stack(values) if is_tensor else [*chain.from_iterable(values)]
            if reduction is not None and len(found):
                found = reduction(found)
            setattr(metric, name, _moved(found, metric.device))


def _copied(state: State | None) -> State | None:
    """Return a copy to which updates of tensors and lists do not write."""
    return state and {name: one.clone() if isinstance(one, torch.Tensor) else copy(one) for name, one in state.items()}


def _moved(value: Tree, device: torch.device) -> Tree:
    return tree_map_only(torch.Tensor, lambda one: one.detach().to(device), value)


# ---- logged values

_LOG = inspect.signature(pl.LightningModule.log)
_OWN = ("name", "value", "batch_size", "sync_dist", "sync_dist_group", "rank_zero_only", "enable_graph")
"""The arguments of `log` that the mean over replicas replaces."""


@dataclass(frozen=True)
class _Logged:
    """A call of `log`.

    Attributes:
        name: The name of the value.
        value: The value.
        rows: The number of rows behind the value.
        options: The other arguments.
        metric: The name of a metric of torchmetrics in the module. `value` is then that of the batch; NaN if it is
            unknown or no scalar.
    """

    name: str
    value: float
    rows: int
    options: Mapping[str, Tree]
    metric: str | None = None


class StepLogs:
    """The calls of `self.log` in one step of all replicas.

    In a step of Lightning's loop, replicas call `log` one after another. `share` then calls it once for each name, with
    the result over all replicas of all instances. In training each replica counts the same, or by the weight of its
    loss; in an evaluation, a value counts by its rows.

    Args:
        module: The module whose replicas log.
        strategy: The strategy of the replicas.
        metrics: The metrics of the module, which have the state of the replica meanwhile.
        is_training: Whether this is a training step.

    Attributes:
        weights: The weights of the replicas whose loss has one; their values count as much.
    """

    def __init__(
        self, module: pl.LightningModule, strategy: Strategy, metrics: Sequence[ReplicaMetric], is_training: bool
    ) -> None:
        self._module, self._strategy, self._metrics, self._is_training = module, strategy, metrics, is_training
        self._of: dict[int, list[_Logged]] = {}
        self.weights: dict[int, float] = {}

    @contextmanager
    def of(self, replica: int, batch: object) -> Iterator[None]:
        """Collect the calls of a replica with a batch. Those of a repeated step count as little as its metrics do."""
        is_again, calls = replica in self._of, list[_Logged]()
        self._of.setdefault(replica, calls)
        for metric in self._metrics:
            metric.begin(replica, is_again)
        vars(self._module)["log"] = lambda *args, **named: calls.append(self._logged(batch, args, named))
        try:
            yield
        finally:
            for metric in self._metrics:
                metric.end(replica)
            del vars(self._module)["log"]

    def _logged(self, batch: object, arguments: Sequence[Tree], named: Mapping[str, Tree]) -> _Logged:
        bound = _LOG.bind(self._module, *arguments, **named).arguments
        options = {key: one for key, one in bound.items() if key not in (*_OWN, "self")}
        name, value = bound["name"], bound["value"]
        if isinstance(value, Metric):
            metric = next((key for key, one in self._module.named_modules() if one is value), None)
            if metric is None:
                raise StrategyError(
                    f"log({name!r}) got a {type(value).__name__} that is no part of the module; make it an attribute "
                    "of the module, so that each replica has its state"
                )
            of_batch = value._forward_cache
            is_scalar = isinstance(of_batch, torch.Tensor) and of_batch.numel() == 1
            return _Logged(name, float(of_batch) if is_scalar else math.nan, 1, options, metric)
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.detach().item()
        if not isinstance(value, int | float | np.generic):
            shape = f" of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
            raise StrategyError(
                f"log({name!r}) got a {type(value).__name__}{shape}; in a step, log numbers and tensors of one "
                "element, which are averaged over all replicas"
            )
        if (rows := bound.get("batch_size")) is None:
            rows = extract_batch_size(batch) if bound.get("on_epoch") or not self._is_training else 1
        return _Logged(name, float(value), rows, options)

    def share(self, is_whole: bool) -> None:
        """Log the results over all replicas. Collective.

        Args:
            is_whole: Whether all replicas have made the step.

        Raises:
            StrategyError: If replicas have logged different names.
        """
        communicator, replicas = self._strategy.communicator, self._strategy.num_replicas_in_sync
        calls = next(iter(self._of.values()), [])
        if not is_whole:
            calls = broadcast_object(communicator, calls, 0, "names that replicas have logged")
        names = [one.name for one in calls]
        for replica, own in self._of.items():
            if [one.name for one in own] != names:
                raise StrategyError(
                    f"replica {replica} has logged {_listed([one.name for one in own])}, but another one "
                    f"{_listed(names)}; log the same names, in the same order, in every replica"
                )
        if not names:
            return
        logged = np.zeros((replicas, len(names), 4))
        for replica, own in self._of.items():
            weight = self.weights.get(replica, 1.0)
            logged[replica] = [(one.value, one.rows, weight if self._is_training else one.rows, 1) for one in own]
        communicator.all_reduce(logged, name=f"logged: {', '.join(names)}")
        for number, call in enumerate(calls):
            values, rows, weights, _ = logged[logged[:, number, 3] > 0, number].T
            result = _reduced(call.options.get("reduce_fx", "mean"), values, weights)
            log: Callable[..., None] = type(self._module).log
            if call.metric is None:
                log(self._module, call.name, torch.tensor(result), batch_size=int(rows.sum()), **call.options)
                continue
            metric = self._module.get_submodule(call.metric)
            metric._forward_cache = None if math.isnan(result) else torch.tensor(result)
            log(self._module, call.name, metric, **call.options)


def _reduced(function: str | Callable[[torch.Tensor], torch.Tensor], values: np.ndarray, weights: np.ndarray) -> float:
    """Return the result over the values of all replicas, rounded once. Its bits depend on the values alone."""
    if callable(function):
        return float(function(torch.tensor(values)))
    kind = function.lower()
    if kind in ("min", "max"):
        return float(getattr(values, kind)())
    if kind not in ("sum", "avg", "mean"):
        raise StrategyError(f"reduce_fx={function!r} is unknown; use 'mean', 'sum', 'min', 'max' or a function")
    if kind == "sum":
        return _sum(values)
    counted = weights > 0  # a value of the weight 0 may be NaN
    return _sum((values * weights)[counted]) / math.fsum(weights[counted]) if counted.any() else math.nan


def _sum(values: np.ndarray) -> float:
    return math.fsum(values) if np.isfinite(values).all() else float(values.sum())


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"


# ---- steps

_OUTSIDE = 2**40  # the first micro-batch in the seeds of random numbers that are drawn outside of training steps
_TRANSFER, _STEP = 1, 2
_TRAINING = "training_step"
_Context: TypeAlias = AbstractContextManager[None]


class ReplicaSteps:
    """The steps of the local replicas, one replica after another.

    Args:
        lightning: The strategy of Lightning's Trainer, which has the module, the device, and the plugin for precision.
        strategy: The strategy of the replicas.

    Attributes:
        batches: The number of batches since a loop began. Random numbers outside of training steps depend on it.
        steps_made: The number of averaged backward passes so far.
        steps_before: The `steps_made` when the last batch began.
    """

    def __init__(self, lightning: ParallelStrategy, strategy: Strategy) -> None:
        self._lightning, self._strategy = lightning, strategy
        self._model: DistributedModel | None = None
        self._means: Sequence[torch.Tensor | None] = ()
        self._seed = self.batches = self.steps_made = self.steps_before = 0

    @property
    def module(self) -> pl.LightningModule:
        """The module."""
        assert self._lightning.lightning_module is not None
        return self._lightning.lightning_module

    def begin(self, seed: int) -> None:
        """Begin a training or an evaluation with a seed of random numbers."""
        self.disconnect()
        self._seed, self.batches, self.steps_before = seed, 0, self.steps_made

    def connect(self, **options: Tree) -> None:
        """Connect the module's gradients with those of the other instances. Collective.

        Args:
            options: The options of `DistributedModel`.
        """
        self._model = DistributedModel(self.module, self._strategy, seed=self._seed, **options)
        self._model.compute_with(self._attributes)

    def disconnect(self) -> None:
        """Free the memory of a training."""
        self._model, self._means = None, ()
        for metric in vars(self).pop("_metrics", ()):
            metric.disconnect()
        if "_attributes" in vars(self):
            vars(self).pop("_attributes").show()

    @cached_property
    def _attributes(self) -> Attributes:
        return Attributes(self.module, (*vars(pl.LightningModule()), "forward"), (Metric,))

    @cached_property
    def _metrics(self) -> Sequence[ReplicaMetric]:
        return metrics_of(self.module, self._strategy)

    def _logs(self, is_training: bool) -> StepLogs:
        return StepLogs(self.module, self._strategy, self._metrics, is_training)

    # ---- random numbers

    def next_batch(self) -> None:
        """Count a batch of all replicas."""
        self.batches += 1
        self.steps_before = self.steps_made

    def _drawing(self, replica: int, purpose: int) -> _Context:
        place = _OUTSIDE + (self.batches << 2) + purpose
        return drawing_from(seed_of(self._seed, replica, self.steps_made, place), self._lightning.root_device)

    def mapped(self, function: Callable[[Batch], Batch], batch: ReplicaBatches) -> ReplicaBatches:
        """Map the batch of each replica with a function that draws the replica's random numbers."""

        def one(replica: int, rows: Batch) -> Batch:
            with self._drawing(replica, _TRANSFER):
                return function(rows)

        return batch.map(one)

    # ---- training

    def train(self, batch: object, /, *others: Tree, **named: Tree) -> Tree:
        """Compute the mean gradients of all replicas, which the backward pass of the mean loss adds. Collective.

        Args:
            batch: The batches of the replicas, or of several loaders.
            others: The arguments of `training_step` after the batch.
            named: Its arguments by name.

        Returns:
            The mean loss; in a dictionary with lists of the local replicas' values if `training_step` returns one.
        """
        batches, precision = by_replica(batch), self._lightning.precision_plugin
        if not self.module.automatic_optimization:  # the only replica of the job calls the optimizers by itself
            [output] = self.run(_TRAINING, precision.train_step_context, batches, *others, **named)
            self.steps_made += 1
            return output
        if (model := self._model) is None:
            raise StrategyError("training_step runs in Trainer.fit only")
        share = self.module.trainer.accumulate_grad_batches
        scaler, redirected = getattr(precision, "scaler", None), self._lightning._forward_redirection
        scale = 1.0 if scaler is None else float(scaler.get_scale())
        logs = self._logs(is_training=True)
        outputs: dict[int, Tree] = {}

        def loss_of(place: torch.Tensor) -> Outcome:
            replica, stated = model.replica, list[object]()
            rows = batches[replica]
            with logs.of(replica, rows), precision.train_step_context(), states_to(stated):
                output = redirected(model, self.module, _TRAINING, rows, *others, **named)
            outputs[replica] = output
            if (weight := one_of(stated, "call strategies.torch.loss_weight once in training_step")) is not None:
                if share > 1:
                    raise StrategyError(
                        f"the loss has a weight, but accumulate_grad_batches={share} gives all batches the same one; "
                        "leave it out, and use larger batches or more replicas"
                    )
                logs.weights[replica] = number_of(weight)
            loss = _loss_of(output) / share
            return Outcome(loss if scaler is None else scaler.scale(loss), weight=weight)

        model.steps_made = self.steps_made
        mean = self._averaged(lambda: model.backward(loss_of, torch.arange(len(batches))))
        self.steps_made = model.steps_made
        logs.share(is_whole=True)
        mean = (mean.to(self._lightning.root_device) * share / scale).requires_grad_()
        mean.register_hook(self._give_means)
        first, *_ = outputs.values()
        if not isinstance(first, Mapping):
            return mean
        extras = {name: [one[name] for one in outputs.values()] for name in first if name != "loss"}
        return {"loss": mean, **tree_map_only(torch.Tensor, torch.Tensor.detach, extras)}

    def _averaged(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the loss of a function whose gradients are kept. Lightning's loop clears older ones afterwards."""
        parameters = list(self.module.parameters())
        before = [one.grad for one in parameters]
        for one in parameters:
            one.grad = None
        try:
            loss = compute()
            self._means = [one.grad for one in parameters]
        finally:
            for one, gradient in zip(parameters, before, strict=True):
                one.grad = gradient
        return loss

    def _give_means(self, _: torch.Tensor) -> None:
        """Add the gradients of the last `train` to the parameters' gradients. Called by autograd for its loss."""
        with torch.no_grad():
            for one, mean in zip(self.module.parameters(), self._means, strict=True):
                if mean is not None:
                    one.grad = mean if one.grad is None else one.grad.add_(mean)
        self._means = ()

    # ---- evaluations

    def run(
        self, method: str, context: Callable[[], _Context], batch: object, /, *others: Tree, **named: Tree
    ) -> list[Tree]:
        """Run a method of the module for each local replica with rows, and return the outputs. Collective if it logs.

        Args:
            method: The name of the method.
            context: A context of Lightning's plugin for precision.
            batch: The batches of the replicas, or of several loaders.
            others: The arguments of the method after the batch.
            named: Its arguments by name.

        Raises:
            StrategyError: If the method writes a buffer, which would then be that of some replicas.
        """
        batches, logs, outputs = by_replica(batch), self._logs(is_training=method == _TRAINING), []
        step, buffers = getattr(self.module, method), _saved_buffers(self.module)
        self._attributes.begin(self._strategy.local_replicas)
        for replica, rows in batches.items():
            draws, attributes = self._drawing(replica, _STEP), self._attributes.of(replica)
            with context(), logs.of(replica, rows), draws, attributes:
                outputs.append(step(rows, *others, **named))
        self._attributes.end()
        written = sorted(name for name, *_ in _saved_buffers(self.module) - buffers)
        if written and self._strategy.num_replicas_in_sync > 1:
            raise StrategyError(
                f"{method} has written the buffer {written[0]}, which would have the rows of some replicas only, also "
                "in checkpoints; log values with self.log, use a metric of torchmetrics, or register the buffer with "
                "persistent=False"
            )
        if self.module.trainer._results is not None:  # predict_step cannot log
            logs.share(batches.is_whole)
        return outputs


def _loss_of(output: Tree) -> torch.Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, torch.Tensor):
        raise StrategyError(
            f"training_step has returned {'no loss' if loss is None else type(loss).__name__}; return a scalar tensor, "
            "or a dictionary with one as 'loss'. A replica cannot skip a step: return a loss multiplied by 0. A "
            "loss has a weight if training_step calls strategies.torch.loss_weight"
        )
    return loss


def _saved_buffers(module: torch.nn.Module) -> set[tuple[str, torch.Tensor, int]]:
    """Return the buffers that a checkpoint has with their names, and how often each was written."""
    return {
        (f"{prefix}.{name}".lstrip("."), one, 0 if one.is_inference() else one._version)
        for prefix, part in module.named_modules()
        for name, one in part._buffers.items()
        if one is not None and name not in part._non_persistent_buffers_set
    }
