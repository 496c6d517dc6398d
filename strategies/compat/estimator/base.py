"""Estimators: training with checkpoints, evaluation and prediction by a `model_fn`."""

from __future__ import annotations

import inspect
import itertools
import logging
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import optax

import strategies.trees as trees
from strategies.argument_checks import positive, wrong_type
from strategies.checkpoints.checkpoint_folder import CheckpointFolder
from strategies.checkpoints.checkpoints import Checkpoints
from strategies.checkpoints.loading import find_checkpoint
from strategies.compat.estimator.model_in_mode import REPORTED, UNUSED, ModelInMode, dealt
from strategies.compat.estimator.run_config import InputFunction, ModeKeys, RunConfig, check_steps
from strategies.compat.estimator.spec import IPUEstimatorSpec
from strategies.data.sources import InputContext, Masked
from strategies.errors import CheckpointError
from strategies.local_strategy import LocalStrategy
from strategies.strategy import Strategy, get_strategy
from strategies.train_state import TrainState
from strategies.trainer import Trainer
from strategies.typing import Element, Function, Leaf, Metric, Tree

T = TypeVar("T")
logger = logging.getLogger(__name__)
_NAME = re.compile(r"\.(?:variables|model_state)\['(.*)'\]")
_FAR = 1 << 60
_COUNT = "gradient_accumulation_count"
_SIZES = {ModeKeys.TRAIN: "train_batch_size", ModeKeys.EVAL: "eval_batch_size", ModeKeys.PREDICT: "predict_batch_size"}


class NanLossDuringTrainingError(RuntimeError):
    """The loss is NaN. The checkpoints are older than this loss."""


@dataclass
class _EstimatorRun:
    """A model in a mode with its trainer, the present state, and the global step."""

    network: ModelInMode
    trainer: Trainer
    state: TrainState
    step: int


class Estimator(ABC):
    """A model that trains, evaluates and predicts. Programs use `IPUEstimator` or `IPUPipelineEstimator`.

    Args:
        model_fn: Function of `features` and any of `labels`, `mode`, `params` and `config`; it returns an
            `IPUEstimatorSpec`, and is traced by JAX.
        model_dir: Folder of checkpoints; None for that of the config, or to keep variables in memory only.
        config: Configuration; None for a worker alone.
        params: Dictionary for `model_fn` and `input_fn`.
        warm_start_from: Checkpoint, or folder of checkpoints, with the first variables of a new training.
        train_batch_size: Rows of all replicas of all workers; functions get those of one replica as
            `params["batch_size"]`. Likewise `eval_batch_size`, and `predict_batch_size` of one worker.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `model_fn` takes other arguments, `config` has another `model_dir`, or a batch size cannot be
            divided.
    """

    _takes: ClassVar[frozenset[str]]  # the names of a batch among the arguments of model_fn
    _adds_losses: ClassVar[bool]  # whether the reported loss of an update is the sum over workers, rather than the mean

    def __init__(
        self,
        model_fn: Function,
        model_dir: str | Path | None = None,
        config: RunConfig | None = None,
        params: Mapping[str, object] | None = None,
        warm_start_from: str | Path | None = None,
        train_batch_size: int | None = None,
        eval_batch_size: int | None = None,
        predict_batch_size: int | None = None,
    ) -> None:
        if not isinstance(config, RunConfig | None):
            raise wrong_type("config", config, "use a RunConfig")
        taken = arguments_of(model_fn)
        others = taken - self._takes - {"mode", "params", "config"}
        if others or "features" in self._takes - taken:
            raise ValueError(f"model_fn has following not expected args: {sorted(others)}, or must include features")
        if params is not None and "params" not in taken:
            raise ValueError("model_fn does not include params argument, but params is passed to Estimator")
        self.model_fn, self.config, self.params = model_fn, config or RunConfig(), dict(params or {})
        self._warm_start_from = warm_start_from
        folders = {str(folder) for folder in (model_dir, self.config.model_dir) if folder}
        if len(folders) > 1:
            raise ValueError(f"model_dir is {model_dir}, but that of RunConfig is {self.config.model_dir}; give one")
        self.model_dir = folders.pop() if folders else None
        devices = self.config.devices
        defaults = devices.ipu_options.check() if devices.ipu_options else None
        self._alone = LocalStrategy(devices.num_replicas, devices.num_shards, defaults=defaults)
        sizes = zip(_SIZES, (train_batch_size, eval_batch_size, predict_batch_size), strict=True)
        self._batch_sizes = {mode: size for mode, size in sizes if size is not None}
        if self._batch_sizes and "batch_size" in self.params:
            raise ValueError("both the estimator and params have a batch size; give one of them")
        for mode in self._batch_sizes:
            self._named(mode)
        self._training: _EstimatorRun | None = None

    def train(
        self,
        input_fn: InputFunction,
        hooks: Sequence[object] | None = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Sequence[object] | None = None,
    ) -> Self:
        """Train from the newest checkpoint in `model_dir`, and save one at the end. Collective.

        Args:
            input_fn: Function of any of `mode`, `params`, `config` and `input_context` that returns the batches of one
                worker: an iterable of features, or of `(features, labels)`.
            hooks: Objects with any of the methods `begin()`; `before_run(context)` and `after_run(context, values)`
                around each loop, with "loss" and "global_step" in `values.results`; and `end(None)`. Call
                `context.request_stop()` to end the training on all instances after this loop.
            steps: Number of iterations, a multiple of `iterations_per_loop`; None for all data.
            max_steps: Global step at which to end, rounded up to a multiple of `iterations_per_loop`.
            saving_listeners: Objects with any of the methods `begin()`, `before_save(None, global_step)` and
                `after_save(None, global_step)` around each checkpoint, and `end(None, global_step)`. If an `after_save`
                returns True, the training ends on all instances.

        Raises:
            TypeError: If a function has the wrong type, or a `host_call` returns nothing.
            ValueError: If a number of steps does not fit, or `model_fn` returns an unfit spec.
            NanLossDuringTrainingError: If the loss is NaN.
            NotImplementedError: With a strategy, if `iterations_per_loop` is above 1. If a `before_run` returns
                anything.
        """
        strategy, config, each = self.strategy_of(ModeKeys.TRAIN), self.config, self._loop(steps)
        save_steps, log_steps = config.save_checkpoints_steps, config.log_step_count_steps
        check_steps("max_steps", max_steps)
        if steps is not None and max_steps is not None:
            raise ValueError("Can not provide both steps and max_steps; give one")
        if strategy is not self._alone and each > 1 and self._takes:
            raise NotImplementedError(f"iterations_per_loop is {each}, but must be 1 with a strategy")
        asked, stop = threading.Event(), threading.Event()  # a loop in which a hook asks to stop is completed
        context, listeners = SimpleNamespace(session=None, request_stop=asked.set), saving_listeners or ()
        first, batches = self._batches(input_fn, ModeKeys.TRAIN, stop.is_set)
        warm = {} if self._training or not self._warm_start_from else self._values(self._warm_start_from)[0]
        run = self._training or self._built(ModeKeys.TRAIN, first, warm)
        network, count = run.network, self._options(ModeKeys.TRAIN).get(_COUNT, 1)
        adds = self._adds_losses and network.update is not None
        scale = strategy.num_replicas_in_sync // config.devices.num_replicas if adds else 1
        if run.trainer.strategy is not strategy:
            raise ValueError("the estimator has trained with another strategy; use that, or a new estimator")
        hooks = [*(hooks or ()), *(network.spec.training_hooks or ())]
        is_heard = strategy.reduce("max", np.int32(len(listeners)))  # an instance may have listeners of its own
        with self._checkpoints(run.trainer) as checkpoints:

            def save() -> None:
                _call(listeners, "before_save", None, run.step)
                checkpoints.save(run.state)
                if is_heard:
                    checkpoints.wait()
                    strategy.broadcast(np.int32(run.step))  # the checkpoint is there, also for other instances
                    if any(_call(listeners, "after_save", None, run.step)):
                        asked.set()

            run.state = checkpoints.restore(run.state)
            run.step = checkpoints.extra.get("global_step", run.step or run.state.step * count)
            network.restore_host(checkpoints.extra.get("host"))
            self._training, saved, saved_at = run, run.step, time.monotonic()
            end = max_steps if steps is None else run.step + steps
            if end is not None and run.step >= end:
                logger.info("Skipping training since max_steps has already saved.")
                return self
            _call([*listeners, *hooks], "begin")
            while (end is None or run.step < end) and (begun := next(batches, None)) is not None:
                losses, before = [], run.step
                if any(one is not None for one in _call(hooks, "before_run", context)):
                    raise NotImplementedError("before_run asks for values; read loss and global_step in after_run")
                for batch in itertools.chain([begun], itertools.islice(batches, each // count - 1)):
                    run.state, metrics = run.trainer.step(run.state, _with_step(batch, before))
                    run.step += count
                    network.call_host(run.step)
                    losses.append(metrics.get(REPORTED, metrics["loss"]))
                loss = float(np.mean(losses)) * scale
                if log_steps and before // log_steps < run.step // log_steps:
                    logger.info("loss = %s, step = %d", loss, run.step)
                results = {"loss": loss, "global_step": run.step}
                _call(hooks, "after_run", context, SimpleNamespace(results=results))
                if np.isnan(loss):
                    raise NanLossDuringTrainingError(f"NaN loss during training, at step {run.step}; lower the rate")
                checkpoints.extra = {"global_step": run.step, "host": network.host_values()}
                checkpoints.after_step(run.state)
                is_late = np.int32(time.monotonic() - saved_at > (config.save_checkpoints_secs or 600))
                if before // save_steps < run.step // save_steps if save_steps else strategy.reduce("max", is_late):
                    saved, saved_at = run.step, time.monotonic()
                    save()
                if asked.is_set():
                    logger.info("a hook or listener ends the training at step %d", run.step)
                    stop.set()
            if run.step != saved:
                save()
        strategy.broadcast(np.int32(run.step))
        _call(listeners, "end", None, run.step)
        _call(hooks, "end", None)
        return self

    def _checkpoints(self, trainer: Trainer) -> AbstractContextManager[Any]:
        if self.model_dir is not None:
            return Checkpoints(self.model_dir, trainer, every=_FAR, keep=self.config.keep_checkpoint_max or _FAR)
        of_state = dict.fromkeys(("save", "after_step", "restore"), lambda state: state)
        return nullcontext(SimpleNamespace(**of_state, wait=lambda: None, extra={}))

    def _built(self, mode: str, element: Tree, values: Mapping[str, Leaf], step: int = 0) -> _EstimatorRun:
        """Return the model for elements like this one, with its trainer and first state."""
        devices, strategy, seed = self.config.devices, self.strategy_of(mode), self.config.tf_random_seed or 0
        network = ModelInMode(self._model(mode), strategy, devices.num_replicas, element, values, seed)
        update, options = network.update, self._options(mode)
        if network.spec.host_call and devices.iterations_per_loop > 1:
            raise ValueError("host_call is not allowed with iterations_per_loop above 1; set it to 1")
        if update and devices.num_replicas > 1 and network.is_independent and not update.optimizer.averages_replicas:
            raise ValueError("This is not a valid replicated training graph; use a CrossReplicaOptimizer")
        if update:
            options["trainable"] = {name: name in update.names for name in network.trained}
        optimizer = update.optimizer.opt if update else optax.set_to_zero()
        trainer = Trainer(strategy, network.loss_fn, optimizer, seed, **options)
        return _EstimatorRun(network, trainer, trainer.init(network.trained, network.state), step)

    def evaluate(
        self,
        input_fn: InputFunction,
        steps: int | None = None,
        hooks: Sequence[object] | None = None,
        checkpoint_path: str | Path | None = None,
        name: str | None = None,
    ) -> dict[str, Metric]:
        """Return the metrics, the mean "loss" over batches, and the "global_step".

        Args:
            input_fn: Function as for `train`.
            steps: Number of batches of each replica, a multiple of `iterations_per_loop`; None for all data.
            hooks: Objects whose methods `begin()` and `end(None)` are called.
            checkpoint_path: Checkpoint, or folder of checkpoints; None for the last training or `model_dir`.
            name: Name of the evaluation in the log.
        """
        self._loop(steps)
        run, outputs = self._outputs(ModeKeys.EVAL, input_fn, checkpoint_path, steps)
        hooks = [*(hooks or ()), *(run.network.spec.evaluation_hooks or ())]
        _call(hooks, "begin")
        found = {**run.network.metrics(outputs), "global_step": run.step}
        _call(hooks, "end", None)
        logger.info("Evaluation %s: %s", name or "", found)
        return found

    def predict(
        self,
        input_fn: InputFunction,
        predict_keys: Sequence[str] | None = None,
        hooks: Sequence[object] | None = None,
        checkpoint_path: str | Path | None = None,
        yield_single_examples: bool = True,
        num_predictions: int | None = None,
    ) -> Iterator[Tree]:
        """Yield the predictions for each row, or for all rows of a loop, of this worker alone, in order.

        Args:
            input_fn: Function as for `train`; labels are ignored.
            predict_keys: Keys of a dictionary of predictions to yield; None for all.
            hooks: Objects as for `evaluate`.
            checkpoint_path: Checkpoint as for `evaluate`.
            yield_single_examples: Whether to yield row by row.
            num_predictions: Number of results after which to end; None for all data.
        """
        run, outputs = self._outputs(ModeKeys.PREDICT, input_fn, checkpoint_path)
        hooks, known = [*(hooks or ()), *(run.network.spec.prediction_hooks or ())], run.network.spec.predictions
        if predict_keys is not None and not (isinstance(known, Mapping) and {*predict_keys} <= {*known}):
            raise ValueError(f"predict_keys are {predict_keys}; name keys of a dictionary of predictions")
        _call(hooks, "begin")
        loops = iter(lambda: list(itertools.islice(outputs, self.config.devices.iterations_per_loop)), [])
        rows = (trees.map(_joined, *loop) for loop in loops)
        rows = rows if predict_keys is None else ({key: one[key] for key in predict_keys} for one in rows)
        found = itertools.chain.from_iterable(map(_examples, rows)) if yield_single_examples else rows
        yield from itertools.islice(found, num_predictions)
        _call(hooks, "end", None)

    def export_saved_model(self, export_dir_base: str | Path, model: Any) -> str:
        """Save a Keras model with the trained values as `export_dir_base/STEP.keras`, and return the path.

        Args:
            export_dir_base: Folder.
            model: Built model with the layers that `model_fn` makes; its variables get the trained values.

        Raises:
            ValueError: If the model has a variable that was not trained.
        """
        from strategies.compat.estimator.keras_variables import fill  # imports Keras

        values, step = self._values(None)
        fill(model, values)
        path = Path(export_dir_base, f"{step}.keras")
        path.parent.mkdir(parents=True, exist_ok=True)
        model.save(path)
        return str(path)

    def get_variable_value(self, name: str) -> np.ndarray:
        """Return the value of a variable, or the "global_step"; `get_variable_names` lists the variables.

        Raises:
            ValueError: If there is no such variable.
        """
        values, step = self._values(None)
        values = {"global_step": np.array(step), **values}
        if name not in values:
            raise ValueError(f"there is no variable {name!r}; use one of {', '.join(values)}")
        return np.asarray(values[name])

    def get_variable_names(self) -> list[str]:
        """Return the names of the variables of the last training, or of the newest checkpoint."""
        return list(self._values(None)[0])

    def latest_checkpoint(self) -> str | None:
        """Return the path of the newest checkpoint, or None."""
        with suppress(CheckpointError):
            return None if self.model_dir is None else str(find_checkpoint(self.model_dir))
        return None

    def _outputs(
        self, mode: str, input_fn: InputFunction, path: str | Path | None, steps: int | None = None
    ) -> tuple[_EstimatorRun, Iterator[Tree]]:
        """Return a model, and its outputs for batches."""
        values, step = self._values(path)
        first, batches = self._batches(input_fn, mode)
        run = self._built(mode, first, values, step)
        if not run.network.is_independent:  # padding would take part in collectives
            whole = _whole(batches)
            batches = iter(run.trainer.strategy.distribute_datasets_from_function(lambda _: whole))
        batches = (one._replace(values=_with_step(one, step)) for one in itertools.islice(batches, steps))
        return run, run.trainer.predict(run.state, batches, run.network.arrays_fn)

    def _values(self, path: str | Path | None) -> tuple[dict[str, Leaf], int]:
        """Return the variables by name and the global step: of a checkpoint, the last training or the newest one."""
        if self._training and path is None:
            run = self._training
            values = {**run.state.variables, **(run.state.model_state or {}), **run.network.host[0]}
            step = run.step
        elif path is None and self.latest_checkpoint() is None:
            if self.strategy_of(ModeKeys.TRAIN).instance_index:  # only instance 0 writes
                raise CheckpointError(f"there is no checkpoint in {self.model_dir} on this host; train first")
            logger.info("Could not find trained model in model_dir: %s, running initialization.", self.model_dir)
            return {}, 0
        else:
            found = find_checkpoint(path or str(self.model_dir))
            training, arrays = CheckpointFolder(found.parent, keep=1).read(found)
            values = {match[1]: arrays[name] for name in arrays if (match := _NAME.fullmatch(name))}
            values |= training.extra.get("host", {})
            step = training.extra.get("global_step", training.step)
        return {name: np.array(value) for name, value in values.items() if name != UNUSED}, step

    def strategy_of(self, mode: str) -> Strategy:
        """Return the strategy of a mode: of the config, of the open scope, or of this worker alone."""
        if mode == ModeKeys.TRAIN:
            return self.config.train_distribute or get_strategy() or self._alone
        return (self.config.eval_distribute if mode == ModeKeys.EVAL else None) or self._alone

    def _named(self, mode: str) -> dict[str, object]:
        """Return the arguments of functions besides the batch."""
        params, replicas = dict(self.params), self.config.devices.num_replicas
        workers = self.strategy_of(mode).num_replicas_in_sync // replicas
        if mode in self._batch_sizes:
            params["batch_size"], rest = divmod(positive(_SIZES[mode], self._batch_sizes[mode]), workers * replicas)
            if rest:
                total = f"the number of workers times that of replicas, ({workers} * {replicas})"
                raise ValueError(f"{_SIZES[mode]} is {self._batch_sizes[mode]}; it must be divisible by {total}")
        return {"mode": mode, "params": params, "config": self.config}

    def _loop(self, steps: int | None) -> int:
        """Return the number of iterations of a loop, after comparing it with a number of steps."""
        each = self.config.devices.iterations_per_loop
        check_steps("steps", steps)
        if steps is not None and steps % each:
            raise ValueError(f"steps is {steps}; it must be a multiple of iterations_per_loop, {each}")
        return each

    @abstractmethod
    def _model(self, mode: str) -> Callable[..., IPUEstimatorSpec]:
        """Return the function of the parts of an element that returns the spec of a mode."""

    def _options(self, mode: str) -> dict[str, Leaf]:
        """Return options of the trainer."""
        return {}

    def _batches(
        self, input_fn: InputFunction, mode: str, is_over: Callable[[], bool] = lambda: False
    ) -> tuple[Tree, Iterator[Masked]]:
        """Return a replica's first element, and the elements of this instance's replicas for each step."""
        strategy, each = self.strategy_of(mode), self.config.devices.num_replicas
        own, total = strategy.local_replicas, strategy.num_replicas_in_sync
        if len(own) % each:
            told = f"num_replicas is {each}, but an instance has {len(own)} replicas, and a worker cannot be split"
            raise ValueError(f"{told}; give the strategy a multiple of {each} replicas for each instance")
        if mode in self._batch_sizes and "params" not in arguments_of(input_fn):
            raise ValueError(f"{_SIZES[mode]} is given, but input_fn does not take params, where the batch size is")

        def of_worker(number: int) -> Iterator[Element]:
            context = None if strategy is self._alone else InputContext(total // each, number, total)
            batches = call(input_fn, {**self._named(mode), "input_context": context})
            if isinstance(batches, tuple | dict) or not isinstance(batches, Iterable):
                raise wrong_type("the result of input_fn", batches, "return an iterable of batches")
            return iter(batches)

        inputs = [of_worker(number) for number in range(own.start // each, own.stop // each)]
        local = batches = dealt(inputs, each, self._options(mode).get(_COUNT, 1), mode != ModeKeys.TRAIN, is_over)
        if mode == ModeKeys.TRAIN:
            batches = iter(strategy.distribute_datasets_from_function(lambda _: local))
        first = next(batches, None)
        if first is None:
            raise ValueError("input_fn returns too few batches; give at least one for each replica and micro-batch")
        return trees.map(lambda leaf: leaf[0], first.values), itertools.chain([first], batches)

    def _spec(self, kind: type[T], mode: str, **parts: Tree) -> T:
        """Return the result of `model_fn`; raise ValueError if it is not a spec of that kind and mode."""
        spec = call(self.model_fn, {**self._named(mode), **parts})
        if not isinstance(spec, kind) or getattr(spec, "mode", None) != mode:
            raise ValueError(f"model_fn should return an {kind.__name__} of mode {mode!r}, but returns {spec!r}")
        return spec


def arguments_of(function: Function) -> set[str]:
    """Return the names of a function's arguments that a `functools.partial` has not given."""
    if not callable(function):
        raise wrong_type("model_fn or input_fn", function, "give a function")
    return inspect.signature(function).parameters.keys() - getattr(function, "keywords", {}).keys()


def call(function: Function, named: Mapping[str, object]) -> Tree:
    """Call a function with the arguments that it takes."""
    takes = arguments_of(function)
    return function(**{name: value for name, value in named.items() if name in takes})


def _with_step(batch: Masked, step: int) -> Tree:
    return batch.values, np.full(len(batch.mask), step, np.int32)


def _whole(batches: Iterator[Masked]) -> Iterator[Masked]:
    for one in batches:
        if not one.mask.all():
            raise ValueError("not all replicas have a last batch, but model_fn combines replicas; give a multiple")
        yield one


def _joined(*leaves: np.ndarray) -> np.ndarray:
    return np.concatenate([leaf.reshape(-1, *leaf.shape[2:]) for leaf in leaves])


def _examples(rows: Tree) -> Iterator[Tree]:
    count, *others = {len(leaf) for leaf in trees.leaves(rows)}
    if others:
        raise ValueError(f"predictions have {count} and {others[0]} rows; all need a row for each example")
    return (trees.map(lambda leaf: leaf[number], rows) for number in range(count))  # noqa: B023  called at once


def _call(hooks: Sequence[object], name: str, *arguments: object) -> list[object]:
    return [getattr(hook, name, lambda *_: None)(*arguments) for hook in hooks]
