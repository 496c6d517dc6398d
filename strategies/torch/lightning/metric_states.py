"""The states of metrics of torchmetrics: each replica has its own, as a process of its own would have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import final

import pytorch_lightning as pl
import torch
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers.abstract import WrapperMetric

from strategies.errors import StrategyError
from strategies.strategy import Strategy
from strategies.torch.lightning.objects import gather_objects
from strategies.typing import Tree

_COUNTERS = ("_update_count", "_computed", "_forward_cache")

State = Mapping[str, Tree]
"""The attributes of a metric that an update changes, by name."""


@final
class MetricStates:
    """The states of a module's metrics, for each local replica.

    While a replica runs the module, metrics have its state. `compute` outside of steps merges the states of all
    replicas of all instances, in the order of the replicas, and is then a collective call.

    Args:
        module: The module with the metrics.
        strategy: The strategy of the replicas.

    Raises:
        StrategyError: If a metric keeps values that are no states.
    """

    def __init__(self, module: pl.LightningModule, strategy: Strategy) -> None:
        _refuse(module)
        metrics = [one for one in module.modules() if isinstance(one, Metric) and one._defaults]
        self._states = [_StatesOfMetric(one, strategy) for one in metrics]

    @contextmanager
    def of(self, replica: int) -> Iterator[None]:
        """Give the metrics the states of a replica, and keep them afterwards."""
        for states in self._states:
            states.begin(replica)
        try:
            yield
        finally:
            for states in self._states:
                states.end(replica)

    def disconnect(self) -> None:
        """Leave the metrics as torchmetrics makes them, with the state of the last replica."""
        for states in self._states:
            states.disconnect()


@final
class _StatesOfMetric:
    """The states of one metric."""

    def __init__(self, metric: Metric, strategy: Strategy) -> None:
        self._metric, self._strategy = metric, strategy
        self._of: dict[int, State] = {}
        self._left = 0  # the count of updates when the last replica ended
        self._is_running = False
        self._before = metric.distributed_available_fn
        metric.distributed_available_fn = self.is_outside
        vars(metric)["_sync_dist"] = self

    def __deepcopy__(self, memo: object) -> _StatesOfMetric:
        """Return the object itself: copies of a module are connected with the same instances."""
        return self

    def disconnect(self) -> None:
        """Undo the changes of the constructor."""
        self._metric.distributed_available_fn = self._before
        vars(self._metric).pop("_sync_dist", None)

    def is_outside(self) -> bool:
        """Return whether no replica runs; torchmetrics then merges the states before it computes."""
        return not self._is_running

    def begin(self, replica: int) -> None:
        """Give the metric the state of a replica."""
        self._forget_if_reset()
        self._is_running = True
        state = self._of.get(replica)
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
        self._of[replica] = self._now()
        self._left = self._metric._update_count
        self._is_running = False

    def _now(self) -> State:
        return {name: getattr(self._metric, name) for name in (*self._metric._defaults, *_COUNTERS)}

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

    def __call__(self, gather: object, process_group: object = None) -> None:
        """Merge the states of all replicas into the metric. Called by torchmetrics in place of `_sync_dist`."""
        self._forget_if_reset()
        own = {
            replica: {name: _on_host(state[name]) for name in self._metric._defaults}
            for replica, state in self._of.items()
        }
        merged: dict[int, State] = {}
        for states in gather_objects(self._strategy.communicator, own, f"states of {type(self._metric).__name__}"):
            merged |= states
        in_order = [merged[replica] for replica in sorted(merged)]
        if not in_order:
            return
        for name, reduction in self._metric._reductions.items():
            values = [state[name] for state in in_order]
            found = _together(values)
            if reduction is not None and (isinstance(found, torch.Tensor) or found):
                found = reduction(found)
            setattr(self._metric, name, _moved(found, self._metric.device))


def _together(values: list[Tree]) -> Tree:
    """Return tensors stacked, and lists joined."""
    if isinstance(values[0], torch.Tensor):
        return torch.stack(values)
    return [one for each in values for one in each]


def _on_host(value: Tree) -> Tree:
    return _moved(value, torch.device("cpu"))


def _moved(value: Tree, device: torch.device) -> Tree:
    if isinstance(value, torch.Tensor):
        return value.detach().to(device)
    return [one.detach().to(device) if isinstance(one, torch.Tensor) else one for one in value]


def _refuse(module: pl.LightningModule) -> None:
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
