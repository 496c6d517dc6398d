"""The estimator whose model is a pipeline of stages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, final

from typing_extensions import override

from strategies.argument_checks import positive
from strategies.compat.estimator.base import Estimator
from strategies.compat.estimator.run_config import ModeKeys
from strategies.compat.estimator.spec import CrossReplicaOptimizer, IPUEstimatorSpec
from strategies.compat.functions.optimizer_function import OptimizerFunctionOutput
from strategies.compat.functions.stage_functions import StageFunctions, listed
from strategies.core.options import GradientAccumulationReductionMethod
from strategies.pipelines.mapping import DeviceMapping, Stage, num_devices
from strategies.pipelines.marks import pipeline_stage
from strategies.pipelines.pipelining import Pipelining
from strategies.typing import Leaf, Metric, Tree

_OF_PIPELINE = ("recomputation_mode", "offload_activations", "offload_gradient_accumulation_buffers")
_OF_STEP = {
    "gradient_accumulation_dtype": "gradient_accumulation_dtype",
    "replicated_optimizer_state_sharding": "replicated_optimizer_state_sharding",
    "offload_weight_update_variables": "offload_optimizer_state",
}


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
        others = {*pipeline_op_kwargs} - {*_OF_PIPELINE, *_OF_STEP, "pipeline_schedule", "name"}
        if others:
            raise ValueError(f"{sorted(others)} may not be passed to IPUPipelineEstimatorSpec; the estimator sets them")
        self.mode, self.stages, self.mapping = mode, computational_stages, device_mapping
        self.count = gradient_accumulation_count
        self.eval_metrics_fn, self.optimizer_function = eval_metrics_fn or dict, optimizer_function or dict
        hooks: dict[str, Any] = {"training_hooks": training_hooks, "evaluation_hooks": evaluation_hooks}
        self.spec = partial(IPUEstimatorSpec, mode, **hooks, prediction_hooks=prediction_hooks)
        self.method = GradientAccumulationReductionMethod.parse(reduction_method)
        self.options = pipeline_op_kwargs

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


@final
class IPUPipelineEstimator(Estimator):
    """An estimator whose `model_fn` takes no batch and returns an `IPUPipelineEstimatorSpec`; see `Estimator`.

    Iterations and steps count micro-batches. Semantics: the original's class of that name.
    """

    _takes, _adds_losses = frozenset[str](), True

    @functools.lru_cache(maxsize=3)  # noqa: B019  the modes of one estimator; earlier ones are freed
    def _pipeline(self, mode: str) -> IPUPipelineEstimatorSpec:
        spec = self._spec(IPUPipelineEstimatorSpec, mode)
        shards, used = self.config.devices.num_shards, num_devices(spec.mapping, len(spec.stages))
        if not shards / 2 < used <= shards:
            raise ValueError(f"the pipeline uses {used} devices, but num_shards is {shards}; round {used} up to 2**n")
        return spec

    @override
    def _options(self, mode: str) -> dict[str, Leaf]:
        own = self._pipeline(mode)
        if mode != ModeKeys.TRAIN:
            return {}
        count, each = positive("gradient_accumulation_count", own.count), self.config.devices.iterations_per_loop
        if each % count:
            told = f"iterations_per_loop is {each}"
            raise ValueError(f"{told}; it must be a multiple of the gradient_accumulation_count, {count}")
        mapping = own.mapping if own.mapping is not None else list(range(len(own.stages)))
        of_pipeline = {name: own.options[name] for name in _OF_PIPELINE if name in own.options}
        pipeline = Pipelining(mapping, own.options.get("pipeline_schedule"), allow_idle_devices=True, **of_pipeline)
        options = {ours: own.options[name] for name, ours in _OF_STEP.items() if name in own.options}
        return options | {"pipeline": pipeline, "gradient_accumulation_count": count, "reduction_method": own.method}

    @override
    def _model(self, mode: str) -> Callable[..., IPUEstimatorSpec]:
        own = self._pipeline(mode)

        def called(*element: Tree) -> IPUEstimatorSpec:
            outputs = own.outputs(*element)
            if mode == ModeKeys.PREDICT:
                if len(outputs) != 1:
                    raise ValueError(f"the last stage returns {len(outputs)} arrays; return one, or a dictionary")
                return own.spec(predictions=outputs[0])
            if mode == ModeKeys.EVAL:
                metrics = dict(own.eval_metrics_fn(*outputs))
                return own.spec(loss=metrics.pop("loss", 0.0), eval_metric_ops=metrics)
            with pipeline_stage(len(own.stages) - 1):
                found: object = own.optimizer_function(*outputs)
                if not isinstance(found, OptimizerFunctionOutput) or found.gradient_capture_context is not None:
                    raise TypeError(f"the optimizer_function returns {found!r}; return a plain OptimizerFunctionOutput")
                update = CrossReplicaOptimizer(found.opt).minimize(found.loss, None, found.variables)
                return own.spec(loss=found.loss, train_op=update)

        return called
