"""A pipeline of functions: each stage has its own device and takes the outputs of the stage before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from strategies.compat.functions.captures import Captures
from strategies.compat.functions.inference import Inference
from strategies.compat.functions.optimizer_function import OptimizerFunctionOutput
from strategies.compat.functions.outfeed_rule import OutfeedRule
from strategies.compat.functions.stage_functions import StageFunctions, listed, tracers_in
from strategies.core.metrics import Metrics
from strategies.jax.feeds.outfeed import OutfeedQueue
from strategies.jax.programs.captures import Reads
from strategies.jax.programs.gradient_capture import shapes_by_tag
from strategies.jax.replicas.current_replica import refuse_in_replica
from strategies.jax.replicas.replica_context import replica_context
from strategies.jax.updates.optimizers import unwrapped
from strategies.outcome import Outcome
from strategies.pipelines.pipelining import Pipelining
from strategies.pipelines.running.micro_batch import MicroBatch, get_current_iteration_counter, tracing
from strategies.pipelines.timetable import Timed
from strategies.pipelines.trace import Trace
from strategies.strategy import Strategy
from strategies.train_state import TrainState
from strategies.trainer import Trainer
from strategies.typing import Batch, Key, Tree, Variables

OptimizerFunction = Callable[..., OptimizerFunctionOutput]
_Elements = Sequence[Sequence[Sequence[np.ndarray]]]
"""Arrays of the elements, by local replica and micro-batch."""


@dataclass(frozen=True)
class Learning:
    """The options of a pipeline that trains.

    Attributes:
        optimizer_function: `(*outputs) -> OptimizerFunctionOutput`.
        options: Options of the `Trainer`.
        accumulates_captured: Whether captured gradients are accumulated like gradients of variables.
        is_sum: Whether gradients of micro-batches are added up.
    """

    optimizer_function: OptimizerFunction
    options: Mapping[str, Any]
    accumulates_captured: bool = True
    is_sum: bool = True

    def of(self, *outputs: Tree) -> OptimizerFunctionOutput:
        """Call the optimizer function with the outputs of the last stage.

        Raises:
            TypeError: If it does not return an OptimizerFunctionOutput.
        """
        found = self.optimizer_function(*outputs)
        if not isinstance(found, OptimizerFunctionOutput):
            raise TypeError(
                f"the optimizer_function returns {found!r}, a {type(found).__name__}; it must return an "
                "OptimizerFunctionOutput"
            )
        return found

    def captures(self, output: OptimizerFunctionOutput, closed: core.ClosedJaxpr, count: int) -> Captures:
        """Return the gradients that a traced program captures."""
        if output.gradient_capture_context is None:
            return Captures()
        dtype = self.options["gradient_accumulation_dtype"]
        return Captures(shapes_by_tag(closed), count, self.accumulates_captured, self.is_sum, dtype)


class Pipeline:
    """Stages that train, or run forward only; `pipeline` makes one.

    Attributes:
        metrics: Metrics of the last update, with the mean "loss" over all replicas; None before the first update.
        trace: Timed work of the local replicas' devices in the last update or run; None before the first.
        strategy: Strategy whose replicas run the stages.
    """

    def __init__(
        self,
        strategy: Strategy,
        functions: StageFunctions,
        outfeed: OutfeedRule,
        learning: Learning | None,
        count: int,
        repeat_count: int,
        pipelining: Pipelining,
    ) -> None:
        self.strategy = strategy
        self.metrics: Metrics | None = None
        self.trace: Trace | None = None
        self._functions = functions
        self._outfeed = outfeed
        self._learning = learning
        self._count = count
        self._repeat_count = repeat_count
        take = None if outfeed.queue is None else self._take
        self._pipelining = replace(pipelining, take_outputs=take, watch=self._watch)
        self._trainer: Trainer | None = None
        self._output: OptimizerFunctionOutput | None = None
        self._captures = Captures()
        self._inference: Inference | None = None
        self._made: Mapping[int, Sequence[Tree]] = {}
        self._fed: dict[OutfeedQueue, int] = {}
        self._reads: Reads | None = None  # values that the stages read when they were traced

    def init(self, variables: Variables, model_state: Tree = None) -> TrainState:
        """Return the initial state, with instance 0's values on every instance. Collective on several instances.

        Args:
            variables: First argument of each stage.
            model_state: Dictionary that stages read with `pipelining_ops.get_model_state` and change with
                `update_model_state`, or None. After an update, floating-point leaves are means over all replicas, and
                other leaves are those of replica 0.

        Raises:
            RuntimeError: Inside `strategy.run`; call pipelines outside, because they run their stages themselves.
            ValueError: If the last stage has outputs but there is no outfeed, or if `Trainer` refuses an option.
        """
        refuse_in_replica("init of a pipeline")
        learning = [] if self._learning is None else [self._learning.optimizer_function]
        self._reads = Reads(*self._functions.all_stages, *learning)
        closed, outputs = self._described(variables, model_state)
        self._reads.settle()
        if self._learning is None:
            self._outfeed.check_outputs(outputs if isinstance(outputs, list | tuple) else [outputs])
            self._inference = None
            everywhere = self.strategy.broadcast({"variables": variables, "model_state": model_state})
            return TrainState(everywhere["variables"], None, 0, model_state=everywhere["model_state"])
        assert self._output is not None
        self._outfeed.check_outputs(outputs)
        self._captures = self._learning.captures(self._output, closed, self._count)
        optimizer, map_gradient = unwrapped(self._output.opt)
        if map_gradient is not None and self._captures.shapes:
            raise ValueError(
                "opt is a MapGradientOptimizer, and a gradient_capture_context captures gradients, which the function "
                "of opt would map too; use one of the two"
            )
        self._trainer = Trainer(
            self.strategy,
            self._captures.loss(self._loss),
            self._captures.optimizer(optimizer),
            map_gradient=map_gradient,
            pipeline=self._pipelining,
            gradient_accumulation_count=self._count,
            trainable=self._captures.trainable(self._output.variables),
            **self._learning.options,
        )
        return self._captures.shown(self._trainer.init(self._captures.extended(variables), model_state))

    def __call__(self, state: TrainState) -> TrainState:
        """Run all micro-batches `repeat_count` times, each followed by an update; the given state is used up.

        Args:
            state: Latest result of `init` or of a call.

        Raises:
            RuntimeError: Before `init`, or inside `strategy.run`.
            EndOfDataError: If the infeed has too few elements.
        """
        refuse_in_replica("a pipeline")
        if not isinstance(state, TrainState) or (self._learning is not None and self._trainer is None):
            raise RuntimeError("a pipeline was called before init; start with state = net.init(variables)")
        if self._reads is not None:
            self._reads.insist("in the inputs, the infeed or the model state, or call init again")
        for _ in range(self._repeat_count):
            elements = self._elements()
            if self._trainer is None:
                self._made = self._inferred(state, elements)
            else:
                state = self._updated(self._trainer, state, elements)
            self._enqueue_outputs()
        return state

    # ---- computing

    def _loss(self, variables: Variables, batch: Batch, key: jax.Array, model_state: Tree = None) -> Outcome:
        assert self._learning is not None
        with tracing(MicroBatch(get_current_iteration_counter(), key, model_state)) as known:
            outputs = listed(self._functions.outputs(variables, [leaf[0] for leaf in batch[1:]]))
            loss = self._functions.in_last_stage(self._learning.of, *outputs).loss
        return Outcome(loss, model_state=known.model_state, outputs=self._outfeed.chosen(outputs, loss))

    def _described(self, variables: Variables, model_state: Tree) -> tuple[core.ClosedJaxpr, Tree]:
        """Return the traced pipeline and the shapes of its outputs; keep the optimizer function's result."""
        replicas = self.strategy.replicas
        seen: list[Tree] = []

        def traced(
            variables: Variables,
            leaves: Sequence[jax.Array],
            number: jax.Array,
            index: jax.Array,
            key: Key,
            model_state: Tree,
        ) -> Tree:
            micro_batch = MicroBatch(number, None if self._learning is None else key, model_state)
            with replica_context(replicas.new_context(index, "shapes")), tracing(micro_batch):
                outputs = self._functions.outputs(variables, leaves, are_made=False)
                if self._learning is None:
                    return jax.tree.map(jnp.asarray, (outputs, None))
                outputs = listed(outputs)
                seen[:] = outputs
                self._output = self._functions.in_last_stage(self._learning.of, *outputs)
                return jax.tree.map(jnp.asarray, (outputs, self._output.loss))

        closed, (outputs, _) = jax.make_jaxpr(traced, return_shape=True)(
            variables, self._functions.spec, np.int32(0), np.int32(0), jax.random.key(0), model_state
        )
        if self._learning is not None:
            self._take_constants(self._learning, seen, outputs)
        return closed, outputs

    def _take_constants(self, learning: Learning, outputs: Sequence[Tree], shapes: Sequence[Tree]) -> None:
        """Rebuild an optimizer that depends on an input, such as a learning rate, from the input's constant value."""
        if not all(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(outputs)):
            known = [_or_zeros(value, shape) for value, shape in zip(outputs, shapes, strict=True)]
            self._output = learning.of(*known)
        assert self._output is not None
        if next(tracers_in(unwrapped(self._output.opt)), None) is not None:
            raise ValueError(
                "the optimizer of the optimizer_function depends on a stage's result, but it is made once for all "
                "updates; make it of inputs that stages pass on, or use optax.inject_hyperparams or a schedule"
            )

    def _updated(self, trainer: Trainer, state: TrainState, elements: _Elements) -> TrainState:
        trained = replace(state, variables=self._captures.extended(state.variables))
        trained, self.metrics = trainer.step(trained, self._batch(elements))
        self._note_captured(trainer, trained)
        return self._captures.shown(trained)

    def _inferred(self, state: TrainState, elements: _Elements) -> Mapping[int, Sequence[Tree]]:
        replicas = self.strategy.replicas
        given = (state.variables, state.model_state)
        if self._inference is None:
            timetable = self._pipelining.timetable(replicas.grid.ipus_per_replica, self._count, training=False)
            widths = self._pipelining.widths(timetable)
            function, spec = self._outputs_without_learning, self._functions.spec
            self._inference = Inference(replicas, function, given, spec, timetable, widths, self._watch)
        return self._inference(given, elements)

    def _outputs_without_learning(self, given: tuple[Variables, Tree], leaves: Sequence[jax.Array]) -> Tree:
        variables, model_state = given
        with tracing(MicroBatch(get_current_iteration_counter(), model_state=model_state)):
            return self._functions.outputs(variables, leaves)

    def _watch(self, replicas: Mapping[int, Sequence[Timed]]) -> None:
        self.trace = Trace(replicas, self._pipelining.recomputes)

    def _take(self, outputs: Mapping[int, Sequence[Tree]]) -> None:
        self._made = outputs

    # ---- elements and outputs

    def _elements(self) -> _Elements:
        """Return the arrays of the elements by local replica and micro-batch."""
        replication = self.strategy.replicas.reducer.replication
        if self._functions.infeed is None:
            return [[[] for _ in range(self._count)] for _ in replication.local]
        return self._functions.infeed.take(replication, self._count)

    def _batch(self, elements: _Elements) -> list[np.ndarray]:
        """Join the arrays of all elements, after an array of zeros that counts rows without an infeed."""
        every = [element for own in elements for element in own]
        return [np.zeros(len(every), np.int32), *(np.stack(leaves) for leaves in zip(*every, strict=True))]

    def _enqueue_outputs(self) -> None:
        queue = self._outfeed.queue
        of_each = list(self._made.values())
        if queue is None or not jax.tree.leaves(of_each):
            return
        if self._outfeed.accumulates:
            of_each = [[self._outfeed.summed(own)] for own in of_each]
        for values in zip(*of_each, strict=True):
            self._enqueue(queue, values)

    def _note_captured(self, trainer: Trainer, state: TrainState) -> None:
        assert self._output is not None
        if self._output.gradient_capture_context is None:
            return
        captured = self._captures.of(trainer.whole(state))
        self._output.gradient_capture_context.take(captured)
        queue = self._output.captured_gradient_outfeed
        if queue is not None and captured:
            self._enqueue(queue, [captured for _ in self.strategy.replicas.reducer.replication.local])

    def _enqueue(self, queue: OutfeedQueue, values: Sequence[Tree]) -> None:
        number = self._fed.get(queue, 0)
        queue.put(self.strategy.replicas.reducer.replication, number, values)
        self._fed[queue] = number + 1


def _or_zeros(value: Tree, shapes: Tree) -> Tree:
    return jax.tree.map(
        lambda leaf, shape: jnp.zeros(shape.shape, shape.dtype) if isinstance(leaf, jax.core.Tracer) else leaf,
        value,
        shapes,
    )
