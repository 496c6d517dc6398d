"""A `model_fn` in one mode, as functions that a `Trainer` takes, the batches of its replicas, and its training."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import strategies.trees as trees
from strategies.checkpoints.checkpoints import Checkpoints
from strategies.compat.estimator.spec import IPUEstimatorSpec, ModeKeys, RunConfig
from strategies.compat.estimator.variables import CallVariables, Gradient, Update
from strategies.data.sources import Masked
from strategies.jax.evaluation.mean import Mean
from strategies.jax.feeds.outfeed import OutfeedMode, OutfeedQueue
from strategies.jax.replicas.replica_context import replica_context
from strategies.jax.replicas.variables import PartOfArray
from strategies.strategy import Strategy
from strategies.trainer import Trainer
from strategies.typing import Batch, Element, Function, Key, Leaf, Metric, Tree, Variables
from strategies.values import Outcome

logger = logging.getLogger("strategies.compat.estimator")
_FAR = 1 << 60
UNUSED = "(none)"
REPORTED = "reported"


class Model:
    """A `model_fn` in one mode, with its trainer. A batch of a step is `(element, global_step)` of each micro-batch.

    Args:
        call: Function of the parts of an element that returns an `IPUEstimatorSpec`.
        config: Configuration of the estimator.
        strategy: Strategy whose replicas run it.
        element: Element of one replica.
        given: Values of variables by name; empty for initial ones.
        options: Options of the trainer.
        step: Global step.
        earlier: Training to continue; None to begin.

    Attributes:
        config: Configuration of the estimator.
        host: Variables of the function of `host_call` by name, for each worker of this instance.
        spec: Result of the first call.
        update: Update of a training step; None if it changes no variable.
        names: Names of the variables of `model_fn`.
        is_independent: Whether replicas use no collectives.
        count: Number of micro-batches of a step.
        trainer: Trainer of the model.
        state: Present state.
        step: Present global step.

    Raises:
        ValueError: If the spec does not suit the configuration.
    """

    spec: IPUEstimatorSpec

    def __init__(
        self,
        call: Function,
        config: RunConfig,
        strategy: Strategy,
        element: Tree,
        given: Mapping[str, Leaf],
        options: Mapping[str, Any],
        step: int = 0,
        earlier: Model | None = None,
    ) -> None:
        devices, self.config = config.devices, config
        self._call, self._seed, self._replicas = call, config.tf_random_seed or 0, devices.num_replicas
        self._outfeed = OutfeedQueue(OutfeedMode.LAST)
        self.host: list[dict[str, Leaf]] = [{} for _ in strategy.local_replicas[:: self._replicas]]
        self.count, self.step = options.get("gradient_accumulation_count", 1), step

        def traced(element: Tree, index: Leaf) -> None:
            context = strategy.replicas.new_context(index, "shapes")
            with replica_context(context):
                self.spec, own, self.update = self._called(given, element, jax.random.key(0), index)
            self.is_independent = context.is_independent
            trained.update({name: own.values[name] for name in own.trained} or {UNUSED: np.zeros((), np.float32)})
            others.update({name: value for name, value in own.values.items() if name not in own.trained})

        trained: dict[str, Leaf] = {}
        others: dict[str, Leaf] = {}
        jax.eval_shape(traced, element, np.int32(0))
        self.names, optimizer = trained.keys() | others.keys(), self.update.optimizer if self.update else None
        if self.spec.host_call and devices.iterations_per_loop > 1:
            raise ValueError("host_call is not allowed with iterations_per_loop above 1; set it to 1")
        if optimizer and self._replicas > 1 and self.is_independent and not optimizer.averages_replicas:
            raise ValueError("This is not a valid replicated training graph; use a CrossReplicaOptimizer")
        if self.update:
            options = {**options, "trainable": {name: name in self.update.names for name in trained}}
        optax_optimizer = optimizer.opt if optimizer else optax.set_to_zero()
        self.trainer = Trainer(strategy, self.loss_fn, optax_optimizer, self._seed, **options)
        self.state = self.trainer.init(trained, others or None)
        if earlier:
            self._take_over(earlier)

    def _take_over(self, earlier: Model) -> None:
        """Continue with the state of an earlier training. Collective."""

        def whole(leaf: Leaf) -> Leaf:
            return leaf.gather("optimizer state of an estimator") if isinstance(leaf, PartOfArray) else leaf

        states = [earlier.trainer.whole(earlier.state), self.trainer.whole(self.state)]
        state, structures = states[0], {jax.tree.structure((one.variables, one.optimizer_state)) for one in states}
        if len(structures) > 1:
            raise ValueError(
                "model_fn has another optimizer or other variables than before; use a new estimator for them"
            )
        del self.state, states  # two states at once are enough
        self.step, self.host = earlier.step, earlier.host
        self.state = self.trainer.adopt(replace(state, optimizer_state=jax.tree.map(whole, state.optimizer_state)))

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
        after = {name: own.assigned.get(name, own.values[name]) for name in state[0]} if state and state[0] else None
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

    def call_host(self) -> None:
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
            variables = CallVariables(kept, None, np.int32(self.step), self._seed)
            with variables.active():
                returned = function(*[one if isinstance(one, Gradient) else next(own) for one in given])
            if clash := variables.values.keys() & self.names:
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


class NanLossDuringTrainingError(RuntimeError):
    """The loss is NaN. The checkpoints are older than this loss."""


class Training:
    """The loop of one call of `Estimator.train`. Collective.

    Args:
        model: Model in training mode.
        folder: Folder of checkpoints; None for none.
        adds_losses: Whether the reported loss of an update is the sum over workers, rather than the mean.
        hooks: Hooks of the call and of the spec.
        listeners: Listeners of the call.

    Attributes:
        checkpoints: Checkpoints of the training; None without a folder.
        listeners: Listeners of this instance, which may have others than other instances.
    """

    def __init__(
        self, model: Model, folder: str | None, adds_losses: bool, hooks: Sequence[object], listeners: Sequence[object]
    ) -> None:
        config, self._strategy = model.config, model.trainer.strategy
        self._model, self._config, self._hooks, self.listeners = model, config, hooks, listeners
        workers = self._strategy.num_replicas_in_sync // config.devices.num_replicas
        self._scale = workers if adds_losses and model.update else 1
        self._is_heard = self._strategy.reduce("max", np.int32(len(listeners)))
        self._is_asked = threading.Event()  # a loop in which a hook asks to stop is completed
        self._context = SimpleNamespace(session=None, request_stop=self._is_asked.set)
        self.checkpoints: Checkpoints | None = None
        if folder is not None:
            keep = config.keep_checkpoint_max or _FAR
            self.checkpoints = Checkpoints(folder, model.trainer, every=_FAR, keep=keep)

    def resume(self) -> None:
        """Continue from the newest checkpoint, if there is one."""
        model, extra, begun = self._model, {}, self._model.state
        if self.checkpoints is not None:
            model.state, extra = self.checkpoints.restore(begun), self.checkpoints.extra
        step, own = model.state.step, model.step if model.state is begun else 0
        since = step - extra.get("step", step)  # made by a Trainer, which has saved the estimator's extra again
        model.step = extra.get("global_step", own or step * model.count) + since * model.count
        model.host = [dict(extra["host"]) for _ in model.host] if extra.get("host") else model.host

    def run(self, batches: Iterator[Masked], iterations: int, end: int | None) -> None:
        """Train in loops of `iterations` until the step `end`, the end of the batches, or a request to stop.

        Raises:
            NanLossDuringTrainingError: If the loss is NaN.
            NotImplementedError: If a `before_run` returns anything.
        """
        model, every = self._model, self._config.save_checkpoints_steps
        saved, saved_at = model.step, time.monotonic()
        notify([*self.listeners, *self._hooks], "begin")
        while self._goes_on(end) and (first := next(batches, None)) is not None:
            before = model.step
            self._loop(chain([first], islice(batches, iterations // model.count - 1)))
            is_late = np.int32(time.monotonic() - saved_at > (self._config.save_checkpoints_secs or 600))
            if before // every < model.step // every if every else self._strategy.reduce("max", is_late):
                saved, saved_at = model.step, time.monotonic()
                self._save()
        if model.step != saved:
            self._save()

    def _goes_on(self, end: int | None) -> bool:
        """Return whether the training has not reached `end`, and no instance asks to stop."""
        is_asked = bool(self._strategy.reduce("max", np.int32(self._is_asked.is_set())))
        if is_asked:
            logger.info("a hook or listener ends the training at step %d", self._model.step)
        return not is_asked and (end is None or self._model.step < end)

    def _loop(self, batches: Iterable[Masked]) -> None:
        model, every, losses, before = self._model, self._config.log_step_count_steps, [], self._model.step
        if any(one is not None for one in notify(self._hooks, "before_run", self._context)):
            raise NotImplementedError("before_run asks for values; read loss and global_step in after_run")
        for batch in batches:
            model.state, metrics = model.trainer.step(model.state, with_step(batch, before))
            model.step += model.count
            model.call_host()
            losses.append(metrics.get(REPORTED, metrics["loss"]))
        loss = float(np.mean(losses)) * self._scale
        if every and before // every < model.step // every:
            logger.info("loss = %s, step = %d", loss, model.step)
        results = {"loss": loss, "global_step": model.step}
        notify(self._hooks, "after_run", self._context, SimpleNamespace(results=results))
        if np.isnan(loss):
            raise NanLossDuringTrainingError(f"NaN loss during training, at step {model.step}; lower the rate")
        if self.checkpoints is not None:
            host = {name: np.asarray(value).tolist() for name, value in model.host[0].items()}
            self.checkpoints.extra = {"global_step": model.step, "step": model.state.step, "host": host}
            self.checkpoints.after_step(model.state)

    def _save(self) -> None:
        model = self._model
        notify(self.listeners, "before_save", None, model.step)
        if self.checkpoints is not None:
            self.checkpoints.save(model.state)
        if self._is_heard:
            if self.checkpoints is not None:
                self.checkpoints.wait()
            self._strategy.broadcast(np.int32(model.step))  # the checkpoint is there, also for other instances
            if any(notify(self.listeners, "after_save", None, model.step)):
                self._is_asked.set()


def notify(objects: Sequence[object], name: str, *arguments: object) -> list[object]:
    """Call the method of each hook or listener that has one of this name, and return the results."""
    return [getattr(one, name, lambda *_: None)(*arguments) for one in objects]


def with_step(batch: Masked, step: int) -> Tree:
    """Return the batch of a step, given the elements of replicas and the global step before."""
    return batch.values, np.full(len(batch.mask), step, np.int32)


def elements_of(batches: Iterable[Element], first: list[Tree]) -> Iterator[Tree]:
    """Yield the parts of each batch of an input, as arrays.

    Args:
        batches: Input of a worker.
        first: Empty list for all workers of an instance; it gets the first element.

    Raises:
        ValueError: If a batch has other shapes or dtypes than the first.
    """
    for given in batches:
        parts = tuple(given) if isinstance(given, tuple | list) else (given,)
        if not 0 < len(parts) < 3:
            raise ValueError(f"a batch of input_fn has {len(parts)} parts; give features, or (features, labels)")
        element = tuple(trees.map(np.asarray, part) for part in (parts[:-1] if parts[-1] is None else parts))
        first[:] = first or [element]
        if (shapes := _shapes(element)) != _shapes(first[0]):
            raise ValueError(f"a batch of input_fn has {shapes}, but the first {_shapes(first[0])}; drop the remainder")
        yield element


def _shapes(element: Tree) -> Tree:
    return trees.map(lambda leaf: (leaf.shape, leaf.dtype), element)
