"""Extensions of a model: the original's options for accumulation, pipelines, replication and feeds."""

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
)
_OF_PIPELINE: Mapping[str, str | None] = {
    **{name: name for name in _SAME_IN_PIPELINE},
    "pipeline_schedule": "schedule",
    **dict.fromkeys(_STEP_OF_PIPELINE),
    "accumulate_outfeed_dtype": None,  # metrics are float32, as in Keras
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
        accumulated: Micro-batches of each replica for one update; None if the program has not set it.
        reduction_method: Reduction of the micro-batches' gradients.
        step: Further options of the step; see `strategies.StepOptions`.
        pipelining: Options of the pipeline; None for a model without stages.
        stages: Stage of each call of a layer; see `strategies.keras.stages`.
        prefetch: Number of batches prepared ahead.
        each_step: Whether callbacks are called after each step rather than each execution.

    Raises:
        TypeError: If an option has the wrong type.
        ValueError: If an option is out of range.
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
        _ = StepOptions(**self.step)  # raises if an option is out of range, as a pipeline does
        if self.pipelining is not None:
            self.pipeline(0, 1)

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of each replica and step."""
        return self.accumulated or 1

    @property
    def is_pipelined(self) -> bool:
        """Whether the program has cut a replica into stages."""
        return self.pipelining is not None or self.stages is not None

    def executed(self, steps_per_execution: int) -> int:
        """Return the number of updates of an execution of `steps_per_execution` micro-batches per replica.

        A `steps_per_execution` of 1 means one update.

        Raises:
            RuntimeError: If the micro-batches do not fill updates.
        """
        if self.accumulated is None or steps_per_execution == 1:
            return 1 if self.each_step else steps_per_execution
        if steps_per_execution % self.accumulated:
            kind = "pipelined model" if self.is_pipelined else "model"
            raise RuntimeError(
                f"The {kind} has been configured to use gradient accumulation for {self.accumulated} steps per "
                f"replica, but steps_per_execution is {steps_per_execution}, which is not a multiple; use a multiple, "
                "or leave steps_per_execution out for one update"
            )
        return 1 if self.each_step else steps_per_execution // self.accumulated

    def pipeline(self, stages: int, devices: int) -> Pipelining:
        """Return the `pipeline` option of the step.

        Args:
            stages: Number of stages.
            devices: Number of devices that a replica spans.
        """
        given = dict(self.pipelining or {})
        mapping = given.pop("device_mapping", None)
        if mapping is None:
            mapping = list(range(stages)) if devices > 1 else [0] * stages
        return Pipelining(device_mapping=mapping, **given)


@keras.saving.register_keras_serializable(package="strategies")
class RecomputationCheckpoint(keras.layers.Layer):
    """A layer that keeps its input; the backward pass of a recomputing stage recomputes from there.

    It returns its input unchanged. It only has an effect in stages with the `recomputation_mode`
    `RecomputeAndBackpropagateInterleaved` of `set_pipelining_options`. Semantics: the original's
    `keras.ipu.layers.RecomputationCheckpoint`.
    """

    def call(self, inputs: Tree) -> Tree:
        """Mark the inputs, one array or several, and return them."""
        return recomputation_checkpoint(inputs)

    def compute_output_shape(self, input_shape: Tree) -> Tree:
        """Return the shape of the inputs."""
        return input_shape


class Extensions:
    """The methods of the original that a strategy adds to a Keras model.

    Args:
        model: Model of Keras.

    Attributes:
        options: Options set so far.
    """

    def __init__(self, model: keras.Model) -> None:
        self.options = ModelOptions()
        self._model = model

    @property
    def devices(self) -> int:
        """The number of devices of a replica: those of `device_mapping`, else one per assigned stage, else one."""
        mapping = (self.options.pipelining or {}).get("device_mapping")
        if mapping is not None:
            return 1 + max(tree.flatten(mapping), default=0)
        staged = self.staged
        return 1 if staged is None else staged.count

    def _set(self, **options: Option) -> None:
        self.options = replace(self.options, **options)
        self._model.train_function = self._model.test_function = self._model.predict_function = None

    def set_asynchronous_callbacks(self, asynchronous: bool = False) -> None:
        """Choose whether callbacks are called after each step (True) or after each execution."""
        require_switches(asynchronous=asynchronous)
        self._set(each_step=asynchronous)

    def set_replication_options(self, replicated_metric_reduction_method: object = "NONE") -> None:
        """Accept the original's ways to merge metrics; each of them merges exactly, over all replicas.

        Raises:
            ValueError: If the way is unknown.
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
        """Accumulate the gradients of several micro-batches per replica for one update.

        Args:
            gradient_accumulation_steps_per_replica: Number of micro-batches; None leaves it as it is.
            gradient_accumulation_reduction_method: SUM, MEAN or RUNNING_MEAN.
            use_v2_gradient_accumulation_optimizer: Accepted; both optimizers of the original do the same here.
            optimizer_kwargs: `dtype`, `offload_weight_update_variables`, `replicated_optimizer_state_sharding` or
                `map_gradient`; see `strategies.StepOptions`.

        Raises:
            TypeError: If an option is unknown or has the wrong type.
            ValueError: If an option is out of range.
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
        """Set how the stages of a replica run.

        Args:
            gradient_accumulation_steps_per_replica: Micro-batches for one update; None leaves it as it is.
            device_mapping: Device of each stage; None gives each stage its own device, in order.
            accumulate_outfeed: Accepted; metrics are merged over an execution with either value.
            gradient_accumulation_reduction_method: SUM, MEAN or RUNNING_MEAN.
            pipelining_kwargs: Options of `strategies.Pipelining`, by the original's names or its own.

        Raises:
            TypeError: If an option is unknown or has the wrong type.
            ValueError: If an option is out of range, or Keras sets it.
        """
        _check_unsupported("set_pipelining_options arguments", pipelining_kwargs, _OF_PIPELINING_OPTIONS, "use")
        _check_unsupported("these are automatically set by Keras", pipelining_kwargs, _BY_KERAS, "leave them out:")
        _check_unsupported("these are not compatible with Keras", pipelining_kwargs, _NOT_WITH_KERAS, "leave them out:")
        said = _translated("pipelining_kwargs", pipelining_kwargs, _OF_PIPELINE)
        given = {"device_mapping": device_mapping} | {name: one for name, one in said.items() if one is not None}
        of_step = {new: pipelining_kwargs[name] for name, new in _STEP_OF_PIPELINE.items() if name in pipelining_kwargs}
        require_switches_or_none(accumulate_outfeed=accumulate_outfeed)
        self._set_accumulation(gradient_accumulation_steps_per_replica, gradient_accumulation_reduction_method)
        self._set(pipelining=given, step={**self.options.step, **of_step})

    def set_infeed_queue_options(self, **kwargs: Option) -> None:
        """Set `prefetch_depth`, the number of batches prepared ahead. Other options of the original have no effect.

        Raises:
            TypeError: If an option is unknown.
            ValueError: If an option is out of range, or Keras sets it.
        """
        _check_unsupported("Keras has its own", kwargs, ("dataset", "infeed_spec", "element_spec"), "leave them out:")
        _translated("kwargs", kwargs, _OF_INFEED)
        if "prefetch_depth" in kwargs:
            self._set(prefetch=kwargs["prefetch_depth"])

    def set_outfeed_queue_options(self, **kwargs: Option) -> None:
        """Accept the original's options, which have no effect: results are ready when a step ends.

        Raises:
            TypeError: If an option is unknown.
            ValueError: If Keras sets an option.
        """
        _check_unsupported("Keras has its own", kwargs, ("outfeed_mode", "device_ordinal"), "leave them out:")
        _translated("kwargs", kwargs, _OF_OUTFEED)

    @property
    def assignments(self) -> Assignments:
        """The calls of the layers of this model, to which stages can be assigned."""
        return Assignments(self._model)

    @property
    def staged(self) -> StagedModel | None:
        """The model in stages; None if no stages are assigned."""
        stages = self.assignments.scoped() if self.options.stages is None else self.options.stages
        if stages is None:
            return None
        self.assignments.check(stages)
        return StagedModel(self.assignments, stages)

    def get_pipeline_stage_assignment(self) -> list[Assignment]:
        """Return the stage of each call of a layer, in the order of the calls."""
        stages = self.options.stages
        scoped = self.assignments.scoped(partly=True) if stages is None else stages
        return self.assignments.listed(scoped)

    def set_pipeline_stage_assignment(self, pipeline_stage_assignment: object) -> None:
        """Assign a stage to each call of a layer.

        Raises:
            TypeError: If the assignment is not a list, or a stage is not an integer.
            ValueError: If calls are missing or in another order, or have no stage.
            RuntimeError: If a stage has no layer, or uses the outputs of a later stage.
        """
        self._set(stages=self.assignments.parsed(pipeline_stage_assignment))

    def reset_pipeline_stage_assignment(self) -> None:
        """Remove all stages."""
        self._set(stages=None)
        self.assignments.forget()

    def print_pipeline_stage_assignment_summary(
        self, line_length: int | None = None, print_fn: Callable[[str], object] = print
    ) -> None:
        """Print one line for each call of a layer, with its stage."""
        width = line_length or 80
        for assignment in self.get_pipeline_stage_assignment():
            print_fn(str(assignment)[:width])

    def save_assets(self, folder: str) -> None:
        """Write the options into a file of the model; Keras calls it. A stock model does not read them.

        A method `save_assets` of the model's class is called first.
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
        """Read the options of a file, except those set by keyword arguments; Keras calls it. See `save_assets`."""
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
"""The methods that a strategy adds to models. Keras calls two of them to save and load more than weights."""


def _call_own(model: keras.Model, name: str, folder: str | None) -> None:
    """Call a method of the model's class, if it has one; `Extensions` replaces only the attribute of the model."""
    getattr(type(model), name, lambda model, folder: None)(model, folder)


def _as_tuples(stages: Tree) -> Tree:
    return tuple(map(_as_tuples, stages)) if isinstance(stages, list) else stages


def _translated(what: str, given: Mapping[str, Option], names: Mapping[str, str | None]) -> dict[str, Option]:
    """Translate the original's option names into the names of this library.

    Raises:
        TypeError: If an option is unknown.
    """
    for name in given:
        if name not in names:
            raise TypeError(f"{what} has {name!r}, which is not known; known are {', '.join(sorted(names))}")
    return {new: value for name, value in given.items() if (new := names[name]) is not None}


def _check_unsupported(why: str, given: Mapping[str, Option], names: tuple[str, ...], way_out: str) -> None:
    found = [name for name in given if name in names]
    if found:
        raise ValueError(f"{', '.join(found)}: {way_out} {why}")
