"""The configuration of estimators, and the results of a `model_fn`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import numpy as np

from strategies.argument_checks import at_least, check_optional, positive, wrong_type
from strategies.compat.estimator.variables import EstimatorOptimizer, Gradient, Update
from strategies.compat.functions.network import Pipeline
from strategies.compat.functions.optimizer_function import OptimizerFunctionOutput
from strategies.compat.functions.stages import StageFunctions, listed
from strategies.compat.ipu_config import IPUConfig, ipus_of_group
from strategies.core.options import GradientAccumulationReductionMethod
from strategies.jax.updates.optimizers import AnyOptimizer
from strategies.pipelines.stages import DeviceMapping, Stage
from strategies.strategy import Strategy
from strategies.typing import Element, Function, Leaf, Metric, Tree

_OF_PIPELINE = {
    *("gradient_accumulation_dtype", "name", "offload_activations", "offload_gradient_accumulation_buffers"),
    *("offload_weight_update_variables", "pipeline_schedule", "recomputation_mode"),
    "replicated_optimizer_state_sharding",
}

InputFunction = Callable[..., Iterable[Element]]


class ModeKeys:
    """The modes in which a `model_fn` is called, as in `tf.estimator`."""

    TRAIN, EVAL, PREDICT = "train", "eval", "infer"


@dataclass(frozen=True)
class IPURunConfig:
    """The devices of a worker: `num_replicas` replicas of `num_shards` devices. `prefetch_depth` has no effect.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a number is out of range, or `ipu_options` configures another number of devices at `ordinal`.
    """

    iterations_per_loop: int = 1
    ipu_options: IPUConfig | None = None
    num_replicas: int = 1
    num_shards: int = 1
    ordinal: int = 0
    prefetch_depth: int | None = None

    def __post_init__(self) -> None:
        for name in ("iterations_per_loop", "num_replicas", "num_shards"):
            positive(name, getattr(self, name))
        at_least(0, "ordinal", self.ordinal)
        positive("prefetch_depth", 3 if self.prefetch_depth is None else self.prefetch_depth)
        check_optional("ipu_options", self.ipu_options, IPUConfig)
        needed, found = self.num_replicas * self.num_shards, self._configured()
        if found != needed:
            asked = f"{needed} devices ({self.num_replicas} num_replicas times {self.num_shards} num_shards)"
            raise ValueError(f"IPURunConfig has {asked}, but ipu_options has {found}; give an IPUConfig with {needed}")

    def _configured(self) -> int:
        config = self.ipu_options or IPUConfig()
        counts = [
            *np.ravel(config.auto_select_ipus),
            *(ipus_of_group(int(one)) for one in np.ravel(config.select_ipus)),
        ]
        return int(counts[self.ordinal]) if self.ordinal < len(counts) else int(not counts)


@dataclass(frozen=True)
class RunConfig:
    """The configuration of an estimator, with arguments of `tf.estimator.RunConfig`; the last three have no effect.

    Without `train_distribute` and `eval_distribute`, each worker trains or evaluates alone. The first values of
    `get_variable` and the keys of replicas depend on `tf_random_seed`; None is 0.
    """

    ipu_run_config: IPURunConfig | None = None
    master: str | None = None
    _: KW_ONLY
    model_dir: str | None = None
    tf_random_seed: int | None = None
    save_checkpoints_steps: int | None = None
    save_checkpoints_secs: float | None = None
    keep_checkpoint_max: int | None = 5
    log_step_count_steps: int | None = 100
    train_distribute: Strategy | None = None
    eval_distribute: Strategy | None = None
    session_config: object = None
    save_summary_steps: int = 100
    keep_checkpoint_every_n_hours: float = 10000

    def __post_init__(self) -> None:
        check_optional("ipu_run_config", self.ipu_run_config, IPURunConfig)
        check_optional("train_distribute", self.train_distribute, Strategy)
        check_optional("eval_distribute", self.eval_distribute, Strategy)
        for name in ("save_checkpoints_steps", "save_checkpoints_secs", "log_step_count_steps"):
            check_steps(name, getattr(self, name))
        if self.save_checkpoints_steps is not None and self.save_checkpoints_secs is not None:
            raise ValueError("Can not provide both save_checkpoints_steps and save_checkpoints_secs; give one")

    @property
    def devices(self) -> IPURunConfig:
        """The devices of a worker."""
        return self.ipu_run_config or IPURunConfig()


@dataclass(frozen=True)
class TrainSpec:
    """The training of `train_and_evaluate`; `max_steps` is the global step at which it ends, None for all data."""

    input_fn: InputFunction
    max_steps: int | None = None
    hooks: Sequence[object] | None = None
    saving_listeners: Sequence[object] | None = None

    def __post_init__(self) -> None:
        check_steps("max_steps", self.max_steps)


@dataclass(frozen=True)
class EvalSpec:
    """The evaluations of `train_and_evaluate`: at the first checkpoint, and `throttle_secs` after the last evaluation.

    After each, the chief calls `export(estimator, export_path, checkpoint_path, eval_result, is_the_final_export)` of
    the exporter, or of each of a list of them. `start_delay_secs` has no effect.
    """

    input_fn: InputFunction
    steps: int | None = 100
    name: str | None = None
    hooks: Sequence[object] | None = None
    exporters: Any = ()
    start_delay_secs: float = 120
    throttle_secs: float = 600

    def __post_init__(self) -> None:
        check_steps("steps", self.steps)


@dataclass(frozen=True, eq=False)
class IPUEstimatorSpec:
    """The model in a mode. Semantics: the original's class of that name.

    Attributes:
        mode: A member of `ModeKeys`.
        predictions: Array, or dictionary of arrays, with a row for each row of the features.
        loss: Scalar, the mean over the rows of the batch; an `Outcome` with a `weight` for weighted means.
        train_op: Result of an `EstimatorOptimizer`, or an optimizer of optax; an array leaves that to `host_call`.
        eval_metric_ops: Metrics by name: scalars, averaged over batches, or `strategies.Mean`.
        eval_metrics: `(function, arrays)`; the function returns metrics by name, given NumPy arrays of a batch.
        host_call: `(function, arrays)`; after each step the function is called for each worker, with NumPy arrays and
            gradients of `compute_gradients`, for which it must return the result of `apply_gradients`. There,
            `get_variable` returns a NumPy array of the worker, which the function may change in place.
        training_hooks: Objects as for `IPUEstimator.train`; also `evaluation_hooks` and `prediction_hooks`.

    Raises:
        TypeError: If an attribute has the wrong type.
        ValueError: If the mode needs another attribute, or both kinds of metrics are given.
    """

    mode: str
    predictions: Tree = None
    loss: Leaf = None
    train_op: Update | AnyOptimizer | Leaf = None
    eval_metric_ops: Mapping[str, Metric] | None = None
    eval_metrics: tuple[Function, Sequence[Leaf] | Mapping[str, Leaf]] | None = None
    host_call: tuple[Function, Sequence[Leaf]] | None = None
    training_hooks: Sequence[object] | None = None
    evaluation_hooks: Sequence[object] | None = None
    prediction_hooks: Sequence[object] | None = None

    def __post_init__(self) -> None:
        needed = {ModeKeys.TRAIN: ("loss", "train_op"), ModeKeys.EVAL: ("loss",), ModeKeys.PREDICT: ("predictions",)}
        if self.mode not in needed:
            raise ValueError(f"mode is {self.mode!r}; use a member of ModeKeys")
        if missing := [name for name in needed[self.mode] if getattr(self, name) is None]:
            raise ValueError(f"Missing {missing[0]}; IPUEstimatorSpec needs it in mode {self.mode!r}")
        if self.mode == ModeKeys.EVAL and (self.eval_metric_ops is None) == (self.eval_metrics is None):
            raise ValueError("give exactly one of eval_metric_ops and eval_metrics in mode 'eval'")
        for name, kinds in (("host_call", list | tuple), ("eval_metrics", list | tuple | Mapping)):
            call = getattr(self, name)
            is_call = isinstance(call, tuple) and len(call) == 2 and callable(call[0]) and isinstance(call[1], kinds)
            if call is not None and not is_call:
                raise wrong_type(name, call, "use a tuple of a function and a list of arrays")

    @property
    def host_arguments(self) -> Sequence[Leaf]:
        """The arguments of the function of `host_call`."""
        return self.host_call[1] if self.host_call else ()

    def update(self) -> Update | None:
        """Return the update of a training step; None if it changes no variable. Call it inside of `model_fn`."""
        handles = [one for one in self.host_arguments if isinstance(one, Gradient)]
        if hasattr(self.train_op, "shape"):
            return handles[0].optimizer.apply_gradients((one, one.variable) for one in handles) if handles else None
        if handles:
            raise ValueError("both train_op and host_call update variables; give the loss as train_op")
        given = self.train_op
        return given if isinstance(given, Update) else EstimatorOptimizer(given).minimize(self.loss)


class IPUPipelineEstimatorSpec:
    """The stages of a model. Semantics: the original's class of that name; see `pipelining_ops.pipeline`.

    Args:
        mode: A member of `ModeKeys`.
        computational_stages: At least two functions; the first gets the features and labels, each later one the
            outputs of the stage before. They read variables with `get_variable` or layers of Keras.
        gradient_accumulation_count: Number of micro-batches of an update.
        eval_metrics_fn: Function of the last stage's outputs that returns metrics by name.
        optimizer_function: Function of the last stage's outputs that returns an `OptimizerFunctionOutput`.
        device_mapping: Device of each stage.
        loss_accumulator_dtype: Without effect.
        reduction_method: Reduction of gradients over micro-batches; over replicas it is the mean.
        pipeline_op_kwargs: Other options of `pipelining_ops.pipeline`.

    Raises:
        ValueError: If the mode lacks a function, or an option is of the estimator itself.
    """

    def __init__(
        self,
        mode: str,
        computational_stages: Sequence[Stage],
        gradient_accumulation_count: int | None = None,
        eval_metrics_fn: Callable[..., Mapping[str, Metric]] | None = None,
        optimizer_function: Callable[..., OptimizerFunctionOutput] | None = None,
        device_mapping: DeviceMapping | None = None,
        loss_accumulator_dtype: object = None,
        training_hooks: Sequence[object] | None = None,
        evaluation_hooks: Sequence[object] | None = None,
        prediction_hooks: Sequence[object] | None = None,
        reduction_method: GradientAccumulationReductionMethod | str = GradientAccumulationReductionMethod.SUM,
        **pipeline_op_kwargs: Any,
    ) -> None:
        needs = {ModeKeys.TRAIN: optimizer_function, ModeKeys.EVAL: eval_metrics_fn}
        if mode in needs and needs[mode] is None:
            raise ValueError(f"mode {mode!r} needs the optimizer_function or eval_metrics_fn of the spec; give it")
        others = pipeline_op_kwargs.keys() - _OF_PIPELINE
        if others:
            raise ValueError(f"{sorted(others)} may not be passed to IPUPipelineEstimatorSpec; the estimator sets them")
        self.mode, self.stages, self.mapping = mode, computational_stages, device_mapping
        self.count = gradient_accumulation_count
        self.eval_metrics_fn, self.optimizer_function = eval_metrics_fn or dict, optimizer_function
        hooks: dict[str, Any] = {"training_hooks": training_hooks, "evaluation_hooks": evaluation_hooks}
        self.spec = partial(IPUEstimatorSpec, mode, **hooks, prediction_hooks=prediction_hooks)
        self._options: dict[str, Leaf] = {**pipeline_op_kwargs, "reduction_method": reduction_method}

    def net(self) -> Pipeline:
        """Return the pipeline that trains, on replicas of the strategy in scope."""
        return Pipeline(
            self.stages,
            self.count,
            optimizer_function=self.optimizer_function,
            device_mapping=self.mapping,
            **self._options,
        )

    def outputs(self, *element: Tree) -> list[Tree]:
        """Return the last stage's outputs, with the marks of a pipeline."""
        named = element[0] if len(element) == 1 and isinstance(element[0], Mapping) else {}
        first, *others = [_without_variables(stage) for stage in self.stages]
        stages = [partial(first, **named) if named else first, *others]
        return listed(StageFunctions(stages, [] if named else element, None).outputs(None, []))


def _without_variables(stage: Stage) -> Any:
    if isinstance(stage, Sequence):
        return [_without_variables(one) for one in stage]
    return lambda variables, *values, **named: stage(*values, **named)


def check_steps(name: str, steps: float | None) -> None:
    """Raise ValueError unless a number is positive or None."""
    if steps is not None and steps <= 0:
        raise ValueError(f"Must specify {name} > 0, given: {steps}")
