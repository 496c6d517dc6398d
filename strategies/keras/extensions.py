"""Extensions of a model: the original's options of accumulation, pipelines, replication and feeds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FunctionType
from typing import Any, TypeAlias

import keras
from keras import tree

from popdist.switches import require_switches, require_switches_or_none
from strategies.argument_checks import positive
from strategies.core.options import GradientAccumulationReductionMethod
from strategies.jax.feeds.infeed import checked_depth
from strategies.jax.options import StepOptions
from strategies.jax.programs.recomputation import recomputation_checkpoint
from strategies.keras.protocols import ModelLike
from strategies.keras.stages import Assignment, Assignments, StagedModel
from strategies.keras.state import random_states, set_random_states
from strategies.pipelines.pipelining import Pipelining
from strategies.typing import Tree

_FILE = "strategies.json"
_METRIC_REDUCTIONS = ("NONE", "LIST", "SUM", "MEAN")
_OF_STEP = {
    "offload_weight_update_variables": "offload_optimizer_state",
    "replicated_optimizer_state_sharding": "replicated_optimizer_state_sharding",
}
_OF_OPTIMIZER = {**_OF_STEP, "map_gradient": "map_gradient", "dtype": "gradient_accumulation_dtype"}
_STEP_OF_PIPELINE = {**_OF_STEP, "gradient_accumulation_dtype": "gradient_accumulation_dtype"}
_SAME_IN_PIPELINE = (
    "schedule",
    "recompute",
    "recomputation_mode",
    "offload_activations",
    "offload_gradient_accumulation_buffers",
    "watch",
    "memory_limit_bytes",
)
_OF_PIPELINE: Mapping[str, str | None] = {
    **{name: name for name in _SAME_IN_PIPELINE},
    "pipeline_schedule": "schedule",
    **dict.fromkeys(_STEP_OF_PIPELINE),
    "accumulate_outfeed_dtype": None,  # metrics are float32, as Keras has them
}
_OF_INFEED: Mapping[str, None] = dict.fromkeys(("prefetch_depth", "device_ordinal", "optimise_latency"))
_OF_OUTFEED: Mapping[str, None] = dict.fromkeys(("buffer_depth", "optimise_latency"))
_BY_KERAS = ("computational_stages", "repeat_count", "inputs", "infeed_queue", "outfeed_queue", "optimizer_function")
_NOT_WITH_KERAS = ("outfeed_loss", "outfeed_mask", "batch_serialization_iterations")
_OF_PIPELINING_OPTIONS = ("gradient_accumulation_count", "device_mapping", "accumulate_outfeed")


Option: TypeAlias = Any
"""The value of an option."""


@dataclass(frozen=True)
class ModelOptions:
    """The options that the extensions of a model have set.

    Attributes:
        accumulated: micro-batches of each replica for one update; None where the model was not told.
        reduction_method: of their gradients.
        step: further options of the step; see `strategies.StepOptions`.
        pipelining: how a replica is cut into stages; None for one that is not.
        stages: the stage of each call of a layer; see `strategies.keras.stages`.
        prefetch: how many batches are prepared ahead.
        each_step: whether callbacks are told of each step, and not of each execution.

    Raises:
        TypeError, ValueError: if an option is out of range.
    """

    accumulated: int | None = None
    reduction_method: GradientAccumulationReductionMethod = GradientAccumulationReductionMethod.SUM
    step: Mapping[str, Option] = field(default_factory=dict)
    pipelining: Mapping[str, Option] | None = None
    stages: tuple[int, ...] | None = None
    prefetch: int = 2
    each_step: bool = False

    def __post_init__(self) -> None:
        if self.accumulated is not None:
            positive("gradient_accumulation_steps_per_replica", self.accumulated)
        checked_depth(self.prefetch)
        _ = StepOptions(**self.step)  # refuses what is out of range, and so does a pipeline
        if self.pipelining is not None:
            self.pipeline(0, 1)

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of each replica and step."""
        return self.accumulated or 1

    @property
    def is_pipelined(self) -> bool:
        """Whether it was told that a replica is cut into stages."""
        return self.pipelining is not None or self.stages is not None

    def executed(self, steps_per_execution: int) -> int:
        """Return how many updates an execution makes of so many micro-batches of each replica; 1 stands for one update.

        Raises:
            RuntimeError: if the micro-batches do not fill updates.
        """
        if self.accumulated is None or steps_per_execution == 1:
            return 1 if self.each_step else steps_per_execution
        if steps_per_execution % self.accumulated:
            kind = "pipelined model" if self.is_pipelined else "model"
            raise RuntimeError(
                f"The {kind} has been configured to use gradient accumulation for {self.accumulated} steps per "
                f"replica, and steps_per_execution is {steps_per_execution}, which is no multiple of it; use one, or "
                "leave steps_per_execution out for one update"
            )
        return 1 if self.each_step else steps_per_execution // self.accumulated

    def pipeline(self, stages: int, devices: int) -> Pipelining:
        """Return the option of the step.

        Args:
            stages: how many there are.
            devices: that a replica spans.
        """
        given = dict(self.pipelining or {})
        mapping = given.pop("device_mapping", None)
        if mapping is None:
            mapping = list(range(stages)) if devices > 1 else [0] * stages
        return Pipelining(device_mapping=mapping, **given)


@keras.saving.register_keras_serializable(package="strategies")
class RecomputationCheckpoint(keras.layers.Layer):
    """Keep a value for the backward pass of a stage that recomputes, which so computes again from there.

    The original's `keras.ipu.layers.RecomputationCheckpoint`. Values stay as they are. The layer has an effect in
    stages with the `recomputation_mode` `RecomputeAndBackpropagateInterleaved` of `set_pipelining_options`.
    """

    def call(self, inputs: Tree) -> Tree:
        """Mark the inputs, one array or several."""
        return recomputation_checkpoint(inputs)

    def compute_output_shape(self, input_shape: Tree) -> Tree:
        """Return the shape of the inputs."""
        return input_shape


class Extensions:
    """The extensions of a model.

    Args:
        model: of Keras.

    Attributes:
        options: what was set.
    """

    def __init__(self, model: ModelLike) -> None:
        self.options = ModelOptions()
        self._model = model

    @property
    def devices(self) -> int:
        """The number of devices that a replica spans, as the model knows it now."""
        mapping = (self.options.pipelining or {}).get("device_mapping")
        if mapping is not None:
            return 1 + max(tree.flatten(mapping), default=0)
        staged = self.staged
        return 1 if staged is None else staged.count

    def _set(self, **options: Option) -> None:
        self.options = replace(self.options, **options)
        self._model.train_function = self._model.test_function = self._model.predict_function = None

    def set_asynchronous_callbacks(self, asynchronous: bool = False) -> None:
        """Have callbacks told of each step, instead of each execution."""
        require_switches(asynchronous=asynchronous)
        self._set(each_step=asynchronous)

    def set_replication_options(self, replicated_metric_reduction_method: object = "NONE") -> None:
        """Accept a method of merging metrics: with each of them they are merged over all replicas, exactly.

        Raises:
            ValueError: if there is no such method.
        """
        method = getattr(replicated_metric_reduction_method, "name", replicated_metric_reduction_method)
        if str(method).upper() not in _METRIC_REDUCTIONS:
            raise ValueError(
                f"replicated_metric_reduction_method is {method!r}; use one of {', '.join(_METRIC_REDUCTIONS)}, all of "
                "which merge metrics over all replicas here"
            )

    def set_gradient_accumulation_options(
        self,
        gradient_accumulation_steps_per_replica: int | None = None,
        gradient_accumulation_reduction_method: Option = GradientAccumulationReductionMethod.SUM,
        use_v2_gradient_accumulation_optimizer: bool = False,
        **optimizer_kwargs: Option,
    ) -> None:
        """Have each replica accumulate the gradients of several micro-batches for one update.

        Args:
            gradient_accumulation_steps_per_replica: how many; None as before.
            gradient_accumulation_reduction_method: SUM, MEAN or RUNNING_MEAN.
            use_v2_gradient_accumulation_optimizer: either optimizer of the original does the same here.
            optimizer_kwargs: `dtype`, `offload_weight_update_variables`, `replicated_optimizer_state_sharding`;
                `map_gradient`, see `strategies.StepOptions`.

        Raises:
            TypeError, ValueError: if an option is unknown or out of range.
        """
        require_switches(use_v2_gradient_accumulation_optimizer=use_v2_gradient_accumulation_optimizer)
        self._set_accumulation(gradient_accumulation_steps_per_replica, gradient_accumulation_reduction_method)
        self._set(step={**self.options.step, **_translated("optimizer_kwargs", optimizer_kwargs, _OF_OPTIMIZER)})

    def _set_accumulation(self, steps: int | None, method: Option) -> None:
        parsed = GradientAccumulationReductionMethod.parse(method)
        self._set(accumulated=self.options.accumulated if steps is None else steps, reduction_method=parsed)

    def set_pipelining_options(
        self,
        gradient_accumulation_steps_per_replica: int | None = None,
        device_mapping: Sequence[int] | None = None,
        accumulate_outfeed: bool | None = None,
        gradient_accumulation_reduction_method: Option = GradientAccumulationReductionMethod.SUM,
        **pipelining_kwargs: Option,
    ) -> None:
        """Say how the stages of a replica run.

        Args:
            gradient_accumulation_steps_per_replica: micro-batches for one update; None as before.
            device_mapping: the device of each stage; None for one after another.
            accumulate_outfeed: metrics are merged over an execution with either.
            gradient_accumulation_reduction_method: SUM, MEAN or RUNNING_MEAN.
            pipelining_kwargs: options of `strategies.Pipelining`, with the original's names or its own.

        Raises:
            TypeError, ValueError: if an option is unknown or out of range.
        """
        _refuse("set_pipelining_options arguments", pipelining_kwargs, _OF_PIPELINING_OPTIONS, "use")
        _refuse("these are automatically set by Keras", pipelining_kwargs, _BY_KERAS, "leave them out:")
        _refuse("these are not compatible with Keras", pipelining_kwargs, _NOT_WITH_KERAS, "leave them out:")
        said = _translated("pipelining_kwargs", pipelining_kwargs, _OF_PIPELINE)
        given = {"device_mapping": device_mapping} | {name: one for name, one in said.items() if one is not None}
        of_step = {new: pipelining_kwargs[name] for name, new in _STEP_OF_PIPELINE.items() if name in pipelining_kwargs}
        require_switches_or_none(accumulate_outfeed=accumulate_outfeed)
        self._set_accumulation(gradient_accumulation_steps_per_replica, gradient_accumulation_reduction_method)
        self._set(pipelining=given, step={**self.options.step, **of_step})

    def set_infeed_queue_options(self, **kwargs: Option) -> None:
        """Say how batches are prepared: `prefetch_depth` of them ahead. What else the original has changes nothing.

        Raises:
            TypeError, ValueError: for what is unknown or out of range, and for what Keras decides.
        """
        _refuse("Keras has its own", kwargs, ("dataset", "infeed_spec", "element_spec"), "leave them out:")
        _translated("kwargs", kwargs, _OF_INFEED)
        if "prefetch_depth" in kwargs:
            self._set(prefetch=kwargs["prefetch_depth"])

    def set_outfeed_queue_options(self, **kwargs: Option) -> None:
        """Accept options that change nothing: what a step returns is there when it ends.

        Raises:
            TypeError, ValueError: for what is unknown, and for what Keras decides.
        """
        _refuse("Keras has its own", kwargs, ("outfeed_mode", "device_ordinal"), "leave them out:")
        _translated("kwargs", kwargs, _OF_OUTFEED)

    @property
    def assignments(self) -> Assignments:
        """The calls of the layers of this model, to which stages can be assigned."""
        return Assignments(self._model)

    @property
    def staged(self) -> StagedModel | None:
        """The model in stages; None where none are assigned."""
        stages = self.assignments.scoped() if self.options.stages is None else self.options.stages
        if stages is None:
            return None
        self.assignments.check(stages)
        return StagedModel(self.assignments, stages)

    def get_pipeline_stage_assignment(self) -> list[Assignment]:
        """Return the stage of each call of a layer, in the order in which they are made."""
        stages = self.options.stages
        scoped = self.assignments.scoped(partly=True) if stages is None else stages
        return self.assignments.listed(scoped)

    def set_pipeline_stage_assignment(self, pipeline_stage_assignment: object) -> None:
        """Assign a stage to each call of a layer.

        Raises:
            TypeError, ValueError, RuntimeError: if calls are missing or others, or stages are not such as a pipeline
                can have.
        """
        self._set(stages=self.assignments.parsed(pipeline_stage_assignment))

    def reset_pipeline_stage_assignment(self) -> None:
        """Have no stages."""
        self._set(stages=None)
        self.assignments.forget()

    def print_pipeline_stage_assignment_summary(
        self, line_length: int | None = None, print_fn: Callable[[str], object] = print
    ) -> None:
        """Print a line for each call of a layer, with its stage."""
        width = line_length or 80
        for assignment in self.get_pipeline_stage_assignment():
            print_fn(str(assignment)[:width])

    def save_assets(self, folder: str) -> None:
        """Write the options beside the variables of a file; called by Keras. A stock model does not read them.

        A method of the model's class with this name is called first.
        """
        _call_own(self._model, "save_assets", folder)
        options = self.options
        saved = {
            "gradient_accumulation_steps_per_replica": options.accumulated,
            "gradient_accumulation_reduction_method": options.reduction_method.name,
            "pipeline_stage_assignment": options.stages,
            "device_mapping": (options.pipelining or {}).get("device_mapping"),
            "prefetch_depth": options.prefetch,
            "asynchronous_callbacks": options.each_step,
            "random_states": random_states(self._model),
        }
        if options != ModelOptions() or saved["random_states"]:
            (Path(folder) / _FILE).write_text(json.dumps(saved))

    def load_assets(self, folder: str | None) -> None:
        """Read them again, but for what was given as keyword arguments; called by Keras. See `save_assets`."""
        _call_own(self._model, "load_assets", folder)
        file = None if folder is None else Path(folder) / _FILE
        if file is None or not file.exists():
            return
        saved = json.loads(file.read_text())
        mapping = saved["device_mapping"]
        set_random_states(self._model, saved["random_states"])
        self._set(
            accumulated=saved["gradient_accumulation_steps_per_replica"],
            reduction_method=GradientAccumulationReductionMethod.parse(saved["gradient_accumulation_reduction_method"]),
            stages=_as_tuples(saved["pipeline_stage_assignment"]),
            pipelining=None if mapping is None else {"device_mapping": mapping},
            prefetch=saved["prefetch_depth"],
            each_step=saved["asynchronous_callbacks"],
        )


METHODS = [name for name, value in vars(Extensions).items() if isinstance(value, FunctionType) and name[0] != "_"]
"""The methods that models get besides those of Keras, and two that Keras calls for what else files have."""


def _call_own(model: ModelLike, name: str, folder: str | None) -> None:
    """Call a method of the model's class, if it has one: the model itself has that of `Extensions`."""
    getattr(type(model), name, lambda model, folder: None)(model, folder)


def _as_tuples(stages: Tree) -> Tree:
    return tuple(map(_as_tuples, stages)) if isinstance(stages, list) else stages


def _translated(what: str, given: Mapping[str, Option], names: Mapping[str, str | None]) -> dict[str, Option]:
    """Return options by the names that they have here.

    Raises:
        TypeError: if there is no such option.
    """
    for name in given:
        if name not in names:
            raise TypeError(f"{what} has {name!r}, which is not known; known are {', '.join(sorted(names))}")
    return {new: value for name, value in given.items() if (new := names[name]) is not None}


def _refuse(why: str, given: Mapping[str, Option], names: tuple[str, ...], way_out: str) -> None:
    found = [name for name in given if name in names]
    if found:
        raise ValueError(f"{', '.join(found)}: {way_out} {why}")
