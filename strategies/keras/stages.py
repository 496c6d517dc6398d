"""Pipeline stages assigned to calls of layers, and models that are computed stage by stage."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import keras
from keras import tree

from strategies.argument_checks import at_least, integer
from strategies.keras.patches import Node, method_replaced, tell_of_new
from strategies.pipelines.stages import pipeline_stage
from strategies.typing import Tree

Stage: TypeAlias = Any
"""A stage, the stages of a nested model, or None."""

Stages: TypeAlias = tuple[Stage, ...]
"""The stage of each call of a layer, or the stages of a nested model; None for a call without one."""

_current: ContextVar[int | None] = ContextVar("pipeline stage of layers", default=None)
_stages: WeakKeyDictionary[Node, int] = WeakKeyDictionary()  # the stage of each call made in a `PipelineStage`


@dataclass
class FunctionalLayerPipelineStageAssignment:
    """The stage of a call of a layer of a functional model; programs may change it and set it again.

    Attributes:
        layer: Layer that is called.
        node_index: Number of the call among the layer's calls.
        pipeline_stage: Stage of the call; None without one.
    """

    layer: keras.Layer
    node_index: int
    pipeline_stage: int | None = None

    def __str__(self) -> str:
        return f"Layer: {self.layer.name}, node index: {self.node_index}, pipeline stage: {self.pipeline_stage}"


@dataclass
class SequentialLayerPipelineStageAssignment:
    """The stage of a layer of a sequential model; programs may change it and set it again.

    Attributes:
        layer: Layer of the model.
        pipeline_stage: Stage of the layer; None without one.
    """

    layer: keras.Layer
    pipeline_stage: int | None = None

    def __str__(self) -> str:
        return f"Layer: {self.layer.name}, pipeline stage: {self.pipeline_stage}"


@dataclass
class FunctionalNestedModelPipelineStageAssignment:
    """The stages of the layers of a model that is called by a functional model.

    Attributes:
        nested_model: Model that is called.
        node_index: Number of the call among the nested model's calls.
        pipeline_stage_assignments: Stages of its layers.
    """

    nested_model: keras.Model
    node_index: int
    pipeline_stage_assignments: Sequence[Assignment] = ()

    def __str__(self) -> str:
        return f"Nested model: {self.nested_model.name}, node index: {self.node_index}, {_lines(self)}"


@dataclass
class SequentialNestedModelPipelineStageAssignment:
    """The stages of the layers of a model that is a layer of a sequential model.

    Attributes:
        nested_model: Model that is a layer.
        pipeline_stage_assignments: Stages of its layers.
    """

    nested_model: keras.Model
    pipeline_stage_assignments: Sequence[Assignment] = ()

    def __str__(self) -> str:
        return f"Nested model: {self.nested_model.name}, {_lines(self)}"


Assignment: TypeAlias = (
    FunctionalLayerPipelineStageAssignment
    | SequentialLayerPipelineStageAssignment
    | FunctionalNestedModelPipelineStageAssignment
    | SequentialNestedModelPipelineStageAssignment
)


def _lines(nested: FunctionalNestedModelPipelineStageAssignment | SequentialNestedModelPipelineStageAssignment) -> str:
    return "; ".join(map(str, nested.pipeline_stage_assignments))


@contextmanager
def PipelineStage(stage: int) -> Iterator[None]:
    """Assign the calls of layers made inside the block to a pipeline stage, in a functional model.

    Example::

        x = keras.Input((784,))
        with strategies.keras.PipelineStage(0):
            hidden = keras.layers.Dense(256, "relu")(x)
        with strategies.keras.PipelineStage(1):
            model = keras.Model(x, keras.layers.Dense(10)(hidden))

    Args:
        stage: Number of the stage, from 0.

    Raises:
        TypeError: If `stage` is not an integer.
        ValueError: If `stage` is negative.
        RuntimeError: Inside another stage.
    """
    at_least(0, "pipeline_stage", stage)
    if _current.get() is not None:
        raise RuntimeError(f"PipelineStage({stage}) is inside PipelineStage({_current.get()}); end one before the next")
    _mark_nodes()
    token = _current.set(stage)
    try:
        yield
    finally:
        _current.reset(token)


@functools.cache
def _mark_nodes() -> None:
    """Record the stage of each call of a layer in a `PipelineStage`, in all threads."""

    def mark(node: Node) -> None:
        stage = _current.get()
        if stage is not None:
            _stages[node] = stage

    tell_of_new(Node, mark)


class Assignments:
    """The calls of the layers of a model, to which stages can be assigned.

    Args:
        model: Functional or sequential model; the calls of other models are not known.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._is_sequential = isinstance(model, keras.Sequential)
        self._computed: object = model._functional if self._is_sequential else model

    @property
    def _are_known(self) -> bool:
        """Whether the calls of the model are known: it is functional, or sequential and built."""
        return isinstance(self._computed, keras.Function)

    @property
    def functional(self) -> keras.Function:
        """The functional model that computes the model's outputs.

        Raises:
            RuntimeError: If the model has no functional model: it has its own `call`, or is not built.
        """
        if not isinstance(self._computed, keras.Function):
            raise RuntimeError(
                f"the calls of layers of model {self._model.name!r} are not known; build the model first. If it has "
                "its own call, mark stages there: with strategies.pipeline_stage(0): ..."
            )
        return self._computed

    @property
    def nodes(self) -> list[Node]:
        """The calls, each after the calls whose outputs it takes."""
        by_depth = self.functional._nodes_by_depth
        ordered = [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]]
        return [node for node in ordered if not node.is_input]

    @property
    def _layers(self) -> list[keras.Model]:
        return list(self._model.layers) if self._is_sequential else [node.operation for node in self.nodes]

    @property
    def _kinds(self) -> tuple[Any, Any]:
        """The classes of assignments: for models that are layers, and for other layers."""
        if self._is_sequential:
            return SequentialNestedModelPipelineStageAssignment, SequentialLayerPipelineStageAssignment
        return FunctionalNestedModelPipelineStageAssignment, FunctionalLayerPipelineStageAssignment

    def listed(self, stages: Stages | None) -> list[Assignment]:
        """Return an assignment for each call; stages of calls that no longer exist are dropped."""
        layers = self._layers
        if stages is None or len(stages) != len(layers):
            stages = (None,) * len(layers)
        nested, own = self._kinds
        places = [()] * len(layers) if self._is_sequential else [(_index_of(node),) for node in self.nodes]
        return [
            nested(layer, *place, Assignments(layer).listed(stage))
            if isinstance(stage, tuple)
            else own(layer, *place, stage)
            for layer, place, stage in zip(layers, places, stages, strict=True)
        ]

    def parsed(self, given: object) -> Stages:
        """Return the stages of a list of assignments or numbers.

        Raises:
            TypeError: If `given` is not a list, or a stage is not an integer.
            ValueError: If calls are missing or in another order, or have no stage.
            RuntimeError: If a stage has no layer, or uses the outputs of a later stage.
        """
        if not isinstance(given, list | tuple):
            raise TypeError(f"pipeline_stage_assignment is a {type(given).__name__}; it must be a list")
        layers = self._layers
        if len(given) != len(layers):
            raise ValueError(
                f"The size of the provided pipeline_stage_assignment ({len(given)}) does not match the number of calls "
                f"of layers of the model ({len(layers)}); give one stage for each call"
            )
        stages = tuple(self._parsed(one, number) for number, one in enumerate(given))
        self.check(stages)
        return stages

    def _parsed(self, one: Stage | Assignment, number: int) -> Stage:
        if integer(one) is not None:
            return at_least(0, "pipeline_stage", one)
        layer = self._layers[number]
        nested, own = self._kinds
        if isinstance(one, nested) and one.nested_model is layer:
            inner = Assignments(layer)
            return tuple(inner._parsed(each, place) for place, each in enumerate(one.pipeline_stage_assignments))
        if not isinstance(one, own):
            raise ValueError(
                f"assignment {number} is a {type(one).__name__}; all elements of pipeline_stage_assignment must be "
                f"instances of {own.__name__}, or numbers"
            )
        is_other_call = not self._is_sequential and one.node_index != _index_of(self.nodes[number])
        if one.layer is not layer or is_other_call:
            raise ValueError(
                f"assignment {number} is for {one.layer.name!r}, but call {number} is of {layer.name!r}; use the "
                "order of get_pipeline_stage_assignment()"
            )
        if one.pipeline_stage is None:
            raise ValueError(f"Layer {layer.name!r} (call {number}) does not have a pipeline stage; give each call one")
        return at_least(0, "pipeline_stage", one.pipeline_stage)

    def check(self, stages: Stages) -> None:
        """Refuse stages that no pipeline can have.

        Raises:
            RuntimeError: If a stage has no layer, layers were added or removed since stages were assigned, or a call
                uses the outputs of a later stage.
            ValueError: If the stages of a sequential model are not in order.
        """
        if len(stages) != len(self._layers):
            raise RuntimeError(
                f"stages were assigned to {len(stages)} calls of layers, but model {self._model.name!r} now has "
                f"{len(self._layers)}; assign them again, or remove them with reset_pipeline_stage_assignment()"
            )
        flat = [stage for one in stages for stage in _flat(one)]
        missing = sorted(set(range(max(flat, default=0))) - set(flat))
        if missing or not flat:
            raise RuntimeError(
                f"Pipeline stages in the graph need to be strictly increasing from 0, but stages {missing or [0]} have "
                "no layer; assign one to each"
            )
        if self._is_sequential:
            steps = [after - before for before, after in zip(flat, flat[1:], strict=False)]
            if flat[0] != 0 or any(step not in (0, 1) for step in steps):
                raise ValueError(
                    f"stages of a sequential model are {flat}; the first layer must have stage 0, and each other layer "
                    "the stage of the layer before it, or the next stage"
                )
        else:
            self._check_stage_order(stages)

    def _check_stage_order(self, stages: Stages) -> None:
        last: dict[int, int] = {}
        for node, stage in zip(self.nodes, stages, strict=True):
            for value in node.input_tensors:
                made = last.get(id(value), 0)
                if made > min(_flat(stage)):
                    raise RuntimeError(
                        f"Layer {node.operation.name!r} in pipeline stage {min(_flat(stage))} has a dependency from a "
                        f"pipeline stage which has not yet been executed, {made}; assign it to that or a later stage"
                    )
            last |= {id(value): max(_flat(stage)) for value in node.outputs}

    def scoped(self, partly: bool = False) -> Stages | None:
        """Return the `PipelineStage` of each call; None if no call has one.

        Args:
            partly: Whether some calls may have none.

        Raises:
            RuntimeError: If some calls have none, and `partly` is False.
        """
        if not self._are_known:
            return None
        stages = tuple(map(_stages.get, self.nodes))
        if all(stage is None for stage in stages):
            return None
        if None in stages and not partly:
            name = self.nodes[stages.index(None)].operation.name
            raise RuntimeError(
                f"All layers of a pipelined model must have an associated pipeline stage. However, {name!r} has not "
                "been assigned to one; call it in a PipelineStage too"
            )
        return stages

    def forget(self) -> None:
        """Forget the stages of `PipelineStage`."""
        for node in self.nodes if self._are_known else ():
            _stages.pop(node, None)


class StagedModel:
    """A model that is computed stage by stage while it is traced.

    Args:
        assignments: Calls of the model.
        stages: Stage of each call; see `Stages`.

    Attributes:
        count: Number of stages.
    """

    def __init__(self, assignments: Assignments, stages: Stages) -> None:
        self._assignments = assignments
        self._stages = stages
        self.count = 1 + max(stage for one in stages for stage in _flat(one))

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Run calls of the model in the order of stages inside the block, each inside the mark of its stage."""
        functional = self._assignments.functional
        with ExitStack() as stack:
            for node, stage in zip(self._assignments.nodes, self._stages, strict=True):
                if isinstance(stage, tuple):
                    stack.enter_context(StagedModel(Assignments(node.operation), stage)())
            stack.enter_context(method_replaced(functional, "_run_through_graph", self._run))
            yield

    def _run(
        self, inputs: Tree, operation_fn: Callable[[keras.Layer], keras.Layer] = lambda op: op, call_fn: object = None
    ) -> Tree:
        functional = self._assignments.functional
        pairs = zip(functional.inputs, tree.flatten(inputs), strict=True)
        values = {id(given): value for given, value in pairs}
        calls = sorted(zip(self._assignments.nodes, self._stages, strict=True), key=lambda call: min(_flat(call[1])))
        for node, stage in calls:
            arguments, named = node.arguments.fill_in(values)
            with ExitStack() as stack:
                if not isinstance(stage, tuple):
                    stack.enter_context(pipeline_stage(stage))
                outputs = operation_fn(node.operation)(*arguments, **named)
            values |= {id(made): value for made, value in zip(node.outputs, tree.flatten(outputs), strict=True)}
        return tree.pack_sequence_as(functional._outputs_struct, [values[id(one)] for one in functional.outputs])


def _index_of(node: Node) -> int:
    return int(node.operation._inbound_nodes.index(node))


def _flat(stage: Stage) -> list[int]:
    return [one for each in stage for one in _flat(each)] if isinstance(stage, tuple) else [stage]
