"""The values that replicas log in one step: their means over all replicas go to Lightning."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.data import extract_batch_size
from torchmetrics import Metric

from strategies.errors import StrategyError
from strategies.strategy import Strategy
from strategies.torch.lightning.objects import broadcast_object
from strategies.typing import Tree

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
        metric: The name of a metric of torchmetrics in the module; `value` is then that of the batch.
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
        is_training: Whether this is a training step.
    """

    def __init__(self, module: pl.LightningModule, strategy: Strategy, is_training: bool) -> None:
        self._module, self._strategy, self._is_training = module, strategy, is_training
        self._of: dict[int, list[_Logged]] = {}
        self._weights: dict[int, float] = {}

    def weigh(self, replica: int, weight: float) -> None:
        """Let the values of a replica count as much as its loss."""
        self._weights[replica] = weight

    @contextmanager
    def of(self, replica: int, batch: object) -> Iterator[None]:
        """Collect the calls of a replica with a batch, in place of those that it has made before."""
        calls = self._of[replica] = []

        def log(*arguments: Tree, **named: Tree) -> None:
            calls.append(self._logged(batch, arguments, named))

        vars(self._module)["log"] = log
        try:
            yield
        finally:
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
            return _Logged(name, _of_this_batch(value), 1, options, metric)
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.detach().item()
        if isinstance(value, bool | np.generic):
            value = float(value)
        if not isinstance(value, int | float):
            raise StrategyError(
                f"log({name!r}) got {_described(value)}; in a step, log numbers and tensors of one element, which are "
                "averaged over all replicas"
            )
        rows = bound.get("batch_size")
        on_epoch = bound.get("on_epoch")
        if rows is None:
            needs_rows = (not self._is_training if on_epoch is None else on_epoch) or not self._is_training
            rows = extract_batch_size(batch) if needs_rows else 1
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
        told = np.zeros((replicas, len(names), 4))
        for replica, own in self._of.items():
            weight = self._weights.get(replica, 1.0)
            told[replica] = [(one.value, one.rows, weight if self._is_training else one.rows, 1) for one in own]
        communicator.all_reduce(told, name=f"logged: {', '.join(names)}")
        for number, call in enumerate(calls):
            values, rows, weights, _ = told[told[:, number, 3] > 0, number].T
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


def _of_this_batch(metric: Metric) -> float:
    """Return the value of a metric for the last batch; NaN if it is unknown or no scalar."""
    found = metric._forward_cache
    return float(found) if isinstance(found, torch.Tensor) and found.numel() == 1 else math.nan


def _described(value: object) -> str:
    shape = f" of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
    return f"a {type(value).__name__}{shape}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"
