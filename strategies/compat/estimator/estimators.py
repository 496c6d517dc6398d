"""Estimators: training with checkpoints, evaluation and prediction by a `model_fn`."""

from __future__ import annotations

import inspect
import itertools
import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Self, TypeVar, final

import numpy as np
from typing_extensions import override

import strategies.trees as trees
from strategies.argument_checks import check_optional, positive, wrong_type
from strategies.checkpoints.checkpoint_folder import CheckpointFolder
from strategies.checkpoints.loading import find_checkpoint
from strategies.compat.estimator.model import UNUSED, Model, Training, elements_of, notify, with_step
from strategies.compat.estimator.spec import (
    EvalSpec,
    InputFunction,
    IPUEstimatorSpec,
    IPUPipelineEstimatorSpec,
    ModeKeys,
    RunConfig,
    TrainSpec,
    check_steps,
)
from strategies.compat.estimator.variables import CrossReplicaOptimizer
from strategies.compat.functions.network import Pipeline
from strategies.data.layout import Layout
from strategies.data.sources import ElementRound, InputContext, Masked, SequentialSource
from strategies.errors import CheckpointError
from strategies.job_strategies import LocalStrategy
from strategies.pipelines.stages import num_devices
from strategies.strategy import Strategy, get_strategy
from strategies.typing import Function, Leaf, Metric, Tree

T = TypeVar("T")
logger = logging.getLogger("strategies.compat.estimator")
_NAME = re.compile(r"\.(?:variables|model_state)\['(.*)'\]")
_SIZES = {ModeKeys.TRAIN: "train_batch_size", ModeKeys.EVAL: "eval_batch_size", ModeKeys.PREDICT: "predict_batch_size"}


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
        check_optional("config", config, RunConfig)
        taken = arguments_of(model_fn).keys()
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
        self._training: Model | None = None

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
        strategy, each = self.strategy_of(ModeKeys.TRAIN), self._loop(steps)
        check_steps("max_steps", max_steps)
        if steps is not None and max_steps is not None:
            raise ValueError("Can not provide both steps and max_steps; give one")
        if strategy is not self._alone and each > 1 and self._takes:
            raise NotImplementedError(f"iterations_per_loop is {each}, but must be 1 with a strategy")
        function, options = self._model(ModeKeys.TRAIN)
        first, batches = self._batches(input_fn, ModeKeys.TRAIN, options.get("gradient_accumulation_count", 1))
        earlier, path = self._training, self._warm_start_from
        if earlier is not None and earlier.trainer.strategy is not strategy:
            raise ValueError("the estimator has trained with another strategy; use that, or a new estimator")
        values = self._values(None if earlier else path)[0] if earlier or path else {}
        model = Model(function, self.config, strategy, first, values, options, earlier=earlier)
        del values  # a copy of all variables
        both = [*(hooks or ()), *(model.spec.training_hooks or ())]
        training = Training(model, self.model_dir, self._adds_losses, both, saving_listeners or ())
        with training.checkpoints or nullcontext():
            training.resume()
            self._training = model
            if earlier is not None:
                del earlier.trainer, earlier.state  # in a cycle, it would keep memory until garbage is collected
            end = max_steps if steps is None else model.step + steps
            if end is not None and model.step >= end:
                logger.info("Skipping training since max_steps has already saved.")
                return self
            training.run(batches, each, end)
        strategy.broadcast(np.int32(model.step))  # the last checkpoint is there, also for other instances
        notify(training.listeners, "end", None, model.step)
        notify(both, "end", None)
        return self

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
        model, outputs = self._outputs(ModeKeys.EVAL, input_fn, checkpoint_path, steps)
        hooks = [*(hooks or ()), *(model.spec.evaluation_hooks or ())]
        notify(hooks, "begin")
        found = {**model.metrics(outputs), "global_step": model.step}
        notify(hooks, "end", None)
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
        model, outputs = self._outputs(ModeKeys.PREDICT, input_fn, checkpoint_path)
        hooks, known = [*(hooks or ()), *(model.spec.prediction_hooks or ())], model.spec.predictions
        if predict_keys is not None and not (isinstance(known, Mapping) and {*predict_keys} <= {*known}):
            raise ValueError(f"predict_keys are {predict_keys}; name keys of a dictionary of predictions")
        notify(hooks, "begin")
        loops = iter(lambda: list(itertools.islice(outputs, self.config.devices.iterations_per_loop)), [])
        rows = (trees.map(_joined, *loop) for loop in loops)
        rows = rows if predict_keys is None else ({key: one[key] for key in predict_keys} for one in rows)
        found = itertools.chain.from_iterable(map(_examples, rows)) if yield_single_examples else rows
        yield from itertools.islice(found, num_predictions)
        notify(hooks, "end", None)

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
    ) -> tuple[Model, Iterator[Tree]]:
        """Return a model, and its outputs for batches."""
        values, step = self._values(path)
        function, options = self._model(mode)
        first, batches = self._batches(input_fn, mode, 1)
        strategy = self.strategy_of(mode)
        model = Model(function, self.config, strategy, first, values, options, step)
        if not model.is_independent:  # padding would take part in collectives
            batches = _together(strategy, batches, mode)
        given = (one._replace(values=with_step(one, step)) for one in itertools.islice(batches, steps))
        return model, model.trainer.predict(model.state, given, model.arrays_fn)

    def _values(self, path: str | Path | None) -> tuple[dict[str, Leaf], int]:
        """Return the variables by name and the global step: of a checkpoint, the last training or the newest one."""
        if self._training and path is None:
            model = self._training
            values = {**model.state.variables, **(model.state.model_state or {}), **model.host[0]}
            step = model.step
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
    def _model(self, mode: str) -> tuple[Callable[..., IPUEstimatorSpec], Mapping[str, Leaf]]:
        """Return the function of the parts of an element that returns the spec of a mode, and options of a trainer."""

    def _batches(self, input_fn: InputFunction, mode: str, count: int) -> tuple[Tree, Iterator[Masked]]:
        """Return a replica's first element, and the elements of this instance's replicas for each step.

        Args:
            input_fn: Function of the program.
            mode: Mode in which it is called.
            count: Number of micro-batches of a step.
        """
        strategy, each = self.strategy_of(mode), self.config.devices.num_replicas
        own, total = strategy.local_replicas, strategy.num_replicas_in_sync
        if len(own) % each:
            problem = f"num_replicas is {each}, but an instance has {len(own)} replicas, and a worker cannot be split"
            raise ValueError(f"{problem}; give the strategy a multiple of {each} replicas for each instance")
        takes = arguments_of(input_fn)
        needs_context = "input_context" in takes and takes["input_context"].default is inspect.Parameter.empty
        if mode in self._batch_sizes and "params" not in takes:
            raise ValueError(f"{_SIZES[mode]} is given, but input_fn does not take params, where the batch size is")
        like: list[Tree] = []

        def of_worker(number: int) -> Iterator[Tree]:
            named = {**self._named(mode), "input_context": InputContext(total // each, number, total)}
            if strategy is self._alone and not needs_context:
                del named["input_context"]
            batches = call(input_fn, named)
            if isinstance(batches, tuple | dict) or not isinstance(batches, Iterable):
                raise wrong_type("the result of input_fn", batches, "return an iterable of batches")
            return elements_of(batches, like)

        def rounds() -> Iterator[ElementRound]:
            """Yield an element for each replica; those of a worker take its elements in turns."""
            while any(parts := [list(itertools.islice(one, each)) for one in inputs]):
                valid = [number < len(part) for part in parts for number in range(each)]
                yield ElementRound([one for part in parts for one in part + like * (each - len(part))], valid)

        inputs = [of_worker(number) for number in range(own.start // each, own.stop // each)]
        local: Iterator[Masked] = SequentialSource(rounds, Layout(1, total, own, "pad", count)).batches(0, 0)
        if mode == ModeKeys.TRAIN:
            local = _together(strategy, local, mode)
        first = next(local, None)
        if first is None:
            raise ValueError("input_fn returns too few batches; give at least one for each replica and micro-batch")
        return trees.map(lambda leaf: leaf[0], first.values), itertools.chain([first], local)

    def _spec(self, kind: type[T], mode: str, **parts: Tree) -> T:
        """Return the result of `model_fn`; raise ValueError if it is not a spec of that kind and mode."""
        spec = call(self.model_fn, {**self._named(mode), **parts})
        if not isinstance(spec, kind) or getattr(spec, "mode", None) != mode:
            raise ValueError(f"model_fn should return an {kind.__name__} of mode {mode!r}, but returns {spec!r}")
        return spec


@final
class IPUEstimator(Estimator):
    """An estimator whose `model_fn` gets a batch and returns an `IPUEstimatorSpec`; see `Estimator`.

    Semantics: the original's class of that name.
    """

    _takes, _adds_losses = frozenset({"features", "labels"}), False

    @override
    def _model(self, mode: str) -> tuple[Callable[..., IPUEstimatorSpec], Mapping[str, Leaf]]:
        def called(features: Tree, labels: Tree = None) -> IPUEstimatorSpec:
            labels = None if mode == ModeKeys.PREDICT else labels
            if labels is not None and "labels" not in arguments_of(self.model_fn):
                raise ValueError("model_fn does not take labels, but input_fn returns labels")
            return self._spec(IPUEstimatorSpec, mode, features=features, labels=labels)

        return called, {}


@final
class IPUPipelineEstimator(Estimator):
    """An estimator whose `model_fn` takes no batch and returns an `IPUPipelineEstimatorSpec`; see `Estimator`.

    Iterations and steps count micro-batches. Semantics: the original's class of that name.
    """

    _takes, _adds_losses = frozenset[str](), True

    @override
    def _model(self, mode: str) -> tuple[Callable[..., IPUEstimatorSpec], Mapping[str, Leaf]]:
        own = self._spec(IPUPipelineEstimatorSpec, mode)
        shards, used = self.config.devices.num_shards, num_devices(own.mapping, len(own.stages))
        if not shards / 2 < used <= shards:
            raise ValueError(f"the pipeline uses {used} devices, but num_shards is {shards}; round {used} up to 2**n")
        net: Pipeline | None = None
        if mode == ModeKeys.TRAIN:
            count, each = positive("gradient_accumulation_count", own.count), self.config.devices.iterations_per_loop
            if each % count:
                problem = f"iterations_per_loop is {each}"
                raise ValueError(f"{problem}; it must be a multiple of the gradient_accumulation_count, {count}")
            with self.strategy_of(mode).scope():
                net = own.net()

        def called(*element: Tree) -> IPUEstimatorSpec:
            outputs = own.outputs(*element)
            if mode == ModeKeys.PREDICT:
                if len(outputs) != 1:
                    raise ValueError(f"the last stage returns {len(outputs)} arrays; return one, or a dictionary")
                return own.spec(predictions=outputs[0])
            if mode == ModeKeys.EVAL:
                metrics = dict(own.eval_metrics_fn(*outputs))
                return own.spec(loss=metrics.pop("loss", 0.0), eval_metric_ops=metrics)
            assert net is not None
            found = net.learned(*outputs)
            if found.gradient_capture_context is not None:
                raise TypeError(f"the optimizer_function returns {found!r}; leave the gradient_capture_context out")
            update = CrossReplicaOptimizer(found.opt).minimize(found.loss, None, found.variables)
            return own.spec(loss=found.loss, train_op=update)

        return called, {} if net is None else net.options


def train_and_evaluate(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec
) -> tuple[dict[str, Metric], list[object]]:
    """Train, and evaluate at checkpoints and at the end. Collective.

    Returns:
        The last evaluation, and what exporters returned.

    Raises:
        TypeError: If an argument has the wrong type.
    """
    for value, kind in ((estimator, Estimator), (train_spec, TrainSpec), (eval_spec, EvalSpec)):
        if not isinstance(value, kind):
            raise wrong_type(f"the {kind.__name__}", value, f"use an object of {kind.__name__}")
    strategy, end = estimator.strategy_of(ModeKeys.TRAIN), train_spec.max_steps
    due_at, is_over = 0.0, False
    result: tuple[dict[str, Metric], list[object]] = {}, []

    def evaluate(is_final: bool) -> None:
        nonlocal due_at, is_over, result
        due_at, is_over = time.monotonic() + eval_spec.throttle_secs, is_final
        found = estimator.evaluate(eval_spec.input_fn, eval_spec.steps, eval_spec.hooks, None, eval_spec.name)
        exporters = [eval_spec.exporters] if hasattr(eval_spec.exporters, "export") else eval_spec.exporters or ()
        exporters, folder = exporters if strategy.is_chief else (), Path(estimator.model_dir or ".", "export")
        saved = estimator.latest_checkpoint()
        result = found, [one.export(estimator, str(folder / one.name), saved, found, is_final) for one in exporters]

    def after_save(session: None, global_step: int) -> None:
        if strategy.broadcast(np.int32(time.monotonic() >= due_at)):  # worker 0 decides
            evaluate(end is not None and global_step >= end)

    listeners = [*(train_spec.saving_listeners or ()), SimpleNamespace(after_save=after_save)]
    estimator.train(train_spec.input_fn, train_spec.hooks, None, end, listeners)
    if not is_over:
        evaluate(is_final=True)
    return result


def arguments_of(function: Function) -> dict[str, inspect.Parameter]:
    """Return the arguments of a function that a `functools.partial` has not given, by name."""
    if not callable(function):
        raise wrong_type("model_fn or input_fn", function, "give a function")
    given = getattr(function, "keywords", {})
    return {name: one for name, one in inspect.signature(function).parameters.items() if name not in given}


def call(function: Function, named: Mapping[str, object]) -> Tree:
    """Call a function with the arguments that it takes."""
    takes = arguments_of(function)
    return function(**{name: value for name, value in named.items() if name in takes})


def _together(strategy: Strategy, batches: Iterator[Masked], mode: str) -> Iterator[Masked]:
    """Yield batches until a replica of any instance has none left. Collective."""
    return iter(strategy.distribute_datasets_from_function(lambda _: _whole(batches, mode)))


def _whole(batches: Iterator[Masked], mode: str) -> Iterator[Masked]:
    """Yield batches until a replica of this instance has none left; raise ValueError if that is an evaluation's."""
    for one in batches:
        if one.mask.all():
            yield one
        elif mode == ModeKeys.TRAIN:
            logger.warning("%d batches of input_fn are not used, because not all replicas have one", one.mask.sum())
            return
        else:
            raise ValueError("not all replicas have a last batch, but model_fn combines replicas; give a multiple")


def _joined(*leaves: np.ndarray) -> np.ndarray:
    return np.concatenate([leaf.reshape(-1, *leaf.shape[2:]) for leaf in leaves])


def _examples(rows: Tree) -> Iterator[Tree]:
    count, *others = {len(leaf) for leaf in trees.leaves(rows)}
    if others:
        raise ValueError(f"predictions have {count} and {others[0]} rows; all need a row for each example")
    return (trees.map(lambda leaf: leaf[number], rows) for number in range(count))  # noqa: B023  called at once
