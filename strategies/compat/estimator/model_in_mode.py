"""A `model_fn` in one mode, as functions that a `Trainer` takes, and the batches of its replicas."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np

import strategies.trees as trees
from strategies.compat.estimator.run_config import ModeKeys
from strategies.compat.estimator.spec import Gradient, IPUEstimatorSpec, Update
from strategies.compat.estimator.variables import CallVariables
from strategies.data.sources import Masked
from strategies.jax.evaluation.mean import Mean
from strategies.jax.feeds.outfeed import OutfeedMode, OutfeedQueue
from strategies.jax.replicas.replica_context import replica_context
from strategies.outcome import Outcome
from strategies.strategy import Strategy
from strategies.typing import Batch, Element, Function, Key, Leaf, Metric, Tree, Variables

logger = logging.getLogger(__name__)
UNUSED = "(none)"
REPORTED = "reported"


class ModelInMode:
    """A `model_fn` in one mode. A batch of a step is `(element, global_step)`, with one element for each micro-batch.

    Args:
        call: Function of the parts of an element that returns an `IPUEstimatorSpec`.
        strategy: Strategy whose replicas run it.
        replicas: Number of replicas of a worker.
        element: Element of one replica.
        given: Values of variables by name; empty for initial ones.
        seed: Seed of initial values.

    Attributes:
        host: Variables of the function of `host_call` by name, for each worker of this instance.
        spec: Result of the first call.
        update: Update of a training step; None if it changes no variable.
        trained: First values of the variables that an optimizer may train by name.
        state: First values of the others; None without any.
        is_independent: Whether replicas use no collectives.
    """

    spec: IPUEstimatorSpec

    def __init__(
        self, call: Function, strategy: Strategy, replicas: int, element: Tree, given: Mapping[str, Leaf], seed: int
    ) -> None:
        self._call, self._seed, self._replicas = call, seed, replicas
        self._outfeed = OutfeedQueue(OutfeedMode.LAST)
        self.host: list[dict[str, Leaf]] = [{} for _ in strategy.local_replicas[::replicas]]

        def traced(element: Tree, index: Leaf) -> None:
            context = strategy.replicas.new_context(index, "shapes")
            with replica_context(context):
                self.spec, own, self.update = self._called(given, element, jax.random.key(0), index)
            self.is_independent = context.is_independent
            self.trained = {name: own.values[name] for name in own.trained} or {UNUSED: np.zeros((), np.float32)}
            self.state = {name: value for name, value in own.values.items() if name not in own.trained} or None

        jax.eval_shape(traced, element, np.int32(0))

    def _called(
        self, given: Mapping[str, Leaf], element: Tree, key: Key, step: Leaf
    ) -> tuple[IPUEstimatorSpec, CallVariables, Update | None]:
        own = CallVariables(given, key, step, self._seed)
        with own.active(), _keras_scope(own):
            spec = self._call(*element)
            return spec, own, spec.update() if spec.mode == ModeKeys.TRAIN else None

    def _in_step(
        self, variables: Variables, batch: Batch, key: Key, state: Sequence[Tree]
    ) -> tuple[IPUEstimatorSpec, CallVariables, Update | None]:
        element, step = jax.tree.map(lambda leaf: leaf[0], batch)
        return self._called({**variables, **(state[0] if state else {})}, element, key, step)

    def loss_fn(self, variables: Variables, batch: Batch, key: Key, *state: Tree) -> Outcome:
        """Return the loss to differentiate, and the loss to report if it is another one."""
        spec, own, update = self._in_step(variables, batch, key, state)
        trained = spec.loss if update is None else update.loss
        if isinstance(spec.loss, Outcome) and trained is not spec.loss:
            raise ValueError("the loss of the spec has a weight, but another loss is minimized; minimize that Outcome")
        outcome = Outcome.of(trained)
        if outcome.model_state is not None:
            raise ValueError("the loss has a model_state, which an estimator does not keep; use layers of Keras")
        metrics = {} if trained is spec.loss else {REPORTED: 1.0 * _scalar(spec.loss, "loss")}
        if arrays := [one for one in spec.host_arguments if not isinstance(one, Gradient)]:
            self._outfeed.enqueue(arrays)
        after = {name: own.assigned.get(name, own.values[name]) for name in self.state} if self.state else None
        loss = 1.0 * _scalar(outcome.loss, "loss")  # a float, if it is an integer
        return replace(outcome, loss=loss, metrics={**outcome.metrics, **metrics}, model_state=after)

    def arrays_fn(self, variables: Variables, batch: Batch, key: Key, *state: Tree) -> Tree:
        """Return the predictions for an element, or its metrics and arrays for `eval_metrics`, with an axis before."""
        spec, _, _ = self._in_step(variables, batch, key, state)
        found = spec.predictions
        if spec.mode == ModeKeys.EVAL:
            found = _means({"loss": spec.loss, **(spec.eval_metric_ops or {})}), (spec.eval_metrics or (dict, []))[1]
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], found)

    def metrics(self, batches: Iterable[Tree]) -> dict[str, Metric]:
        """Merge the metrics, and those of `eval_metrics`, element by element."""
        merged: dict[str, Mean] = {}
        function = (self.spec.eval_metrics or (dict, []))[0]
        for batch in batches:
            for row in range(len(trees.leaves(batch)[0])):
                found, arrays = trees.map(lambda leaf: leaf[row], batch)  # noqa: B023  called at once
                found |= _means(function(**arrays) if isinstance(arrays, Mapping) else function(*arrays))
                for name, one in found.items():
                    merged[name] = merged[name].merge(one.widened()) if name in merged else one.widened()
        return {name: one.value for name, one in merged.items()}

    def restore_host(self, values: Mapping[str, Leaf] | None) -> None:
        """Give the variables of `host_call` the values of worker 0 that a checkpoint has."""
        self.host = [dict(values) for _ in self.host] if values else self.host

    def host_values(self) -> dict[str, Leaf]:
        """Return the variables of `host_call` of the first worker, for a checkpoint."""
        return {name: np.asarray(value).tolist() for name, value in self.host[0].items()}

    def call_host(self, step: int) -> None:
        """Call the function of `host_call` once for each worker of this instance.

        Raises:
            TypeError: If it returns nothing.
            ValueError: If it does not apply the gradients that it gets, or makes a variable of `model_fn`.
        """
        if self.spec.host_call is None:
            return
        function, given = self.spec.host_call
        handles = {one.name for one in given if isinstance(one, Gradient)}
        fed = self._outfeed.dequeue() if len(handles) < len(given) else []
        workers, each = len(self.host), self._replicas
        fed = [leaf.reshape(workers, *[each] * (each > 1), *leaf.shape[workers * each > 1 :]) for leaf in fed]
        for worker, kept in enumerate(self.host):
            own = (leaf[worker] for leaf in fed)
            variables = CallVariables(kept, None, np.int32(step), self._seed)
            with variables.active():
                returned = function(*[one if isinstance(one, Gradient) else next(own) for one in given])
            if clash := variables.values.keys() & {*self.trained, *(self.state or ())}:
                raise ValueError(f"host_call makes {clash}, which model_fn has too; name each variable once")
            kept.update(variables.values)
            if returned is None:
                raise TypeError("the function of host_call returns None; return an array, or an update")
            if handles and not (isinstance(returned, Update) and returned.names == handles):
                raise ValueError("the function of host_call gets gradients; return apply_gradients of all of them")


def _keras_scope(own: CallVariables) -> AbstractContextManager[object]:
    if sys.modules.get("keras") is None:
        return nullcontext()
    from strategies.compat.estimator.keras_variables import KerasVariables  # imports Keras

    return KerasVariables(own)


def _means(found: Mapping[str, Metric]) -> dict[str, Mean]:
    return {name: one if isinstance(one, Mean) else _mean(name, Outcome.of(one)) for name, one in found.items()}


def _mean(name: str, given: Outcome) -> Mean:
    loss = _scalar(given.loss, name)
    return Mean(loss, 1.0) if given.weight is None else Mean.of(loss[None], jnp.reshape(given.weight, 1))


def _scalar(value: Leaf, name: str) -> Leaf:
    array = value if hasattr(value, "shape") else np.asarray(value)
    if array.size != 1:
        raise ValueError(f"{name} of model_fn is of shape {list(array.shape)}; it must be a scalar, such as a mean")
    return array.reshape(())


def dealt(
    inputs: Sequence[Iterator[Element]], replicas: int, count: int, pads: bool, is_over: Callable[[], bool]
) -> Iterator[Masked]:
    """Yield the elements of an instance's replicas for each step, stacked, with their mask.

    Args:
        inputs: Input of each worker.
        replicas: Number of replicas of a worker. Element i * replicas + r is micro-batch i of replica r.
        count: Number of micro-batches of a step.
        pads: Whether to repeat an element for replicas that have none left, from the second step on. If not, end, and
            warn of elements that are left.
        is_over: Function that says whether to end before another step.

    Raises:
        ValueError: If batches differ in their shapes.
    """
    first, each = None, replicas * count
    while not is_over():
        parts = [[_element(one) for one in islice(own, each)] for own in inputs]
        mask = np.array([number < len(part) for part in parts for number in range(each)])
        if not mask.any() or not (mask.all() or (pads and first)):
            if mask.any():
                logger.warning("%d batches of input_fn are not used, because not all replicas have one", mask.sum())
            return
        first = first or parts[0][0]
        parts = [part + [first] * (each - len(part)) for part in parts]
        rows = [one for part in parts for replica in range(replicas) for one in part[replica::replicas]]
        if other := [_shapes(one) for one in rows if _shapes(one) != _shapes(first)]:
            raise ValueError(f"a batch of input_fn has {other[0]}, but the first {_shapes(first)}; drop the remainder")
        yield Masked(trees.map(lambda *leaves: np.stack(leaves), *rows), mask)


def _shapes(element: Tree) -> Tree:
    return trees.map(lambda leaf: (leaf.shape, leaf.dtype), element)


def _element(given: Element) -> tuple[Tree, ...]:
    parts = tuple(given) if isinstance(given, tuple | list) else (given,)
    if not 0 < len(parts) < 3:
        raise ValueError(f"a batch of input_fn has {len(parts)} parts; give features, or (features, labels)")
    return tuple(trees.map(np.asarray, part) for part in (parts[:-1] if parts[-1] is None else parts))
