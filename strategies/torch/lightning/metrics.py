"""Metrics and logged values of replicas, and objects that instances send to each other."""

from __future__ import annotations

import inspect
import math
import pickle
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar, final

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.data import extract_batch_size
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers.abstract import WrapperMetric

from collectives import Communicator
from strategies.core.agreement import broadcast_bytes
from strategies.errors import StrategyError
from strategies.strategy import Strategy
from strategies.torch.agreement import gather_bytes
from strategies.torch.tensors import HOST
from strategies.typing import Tree

Value = TypeVar("Value")
_PROTOCOL = pickle.HIGHEST_PROTOCOL


def broadcast_object(communicator: Communicator, value: Value, root: int, name: str) -> Value:
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
    received = broadcast_bytes(communicator, pickle.dumps(value, _PROTOCOL) if is_root else b"", root, name)
    found: Value = value if is_root else pickle.loads(received)  # noqa: S301 - the job's own connections carry it
    return found


def gather_objects(communicator: Communicator, value: Value, name: str) -> list[Value]:
    """Return the objects of all instances on every instance, in the order of the ranks. Collective.

    Args:
        communicator: The communicator of all instances.
        value: The object of this instance.
        name: The name of the call in messages.
    """
    if communicator.size == 1:
        return [value]
    gathered = gather_bytes(communicator, pickle.dumps(value, _PROTOCOL), name)
    return [pickle.loads(one) for one in gathered]  # noqa: S301


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
        own = {
            replica: _moved({name: state[name] for name in metric._defaults}, HOST)
            for replica, state in self._of.items()
        }
        merged = ChainMap(*gather_objects(self._strategy.communicator, own, f"states of {type(metric).__name__}"))
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
        vars(self._module)["log"] = lambda *args, **named: calls.append(self._logged(batch, args, named))
        for metric in self._metrics:
            metric.begin(replica, is_again)
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
