"""The computation of one replica in a step: the gradients of its micro-batches, in the requested precision."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from strategies.core.options import CommonOptions, name_of_dtype
from strategies.jax.gradients.computation import Trainable, check_weight, metric_names, naming_missing_keys
from strategies.jax.gradients.model_state import (
    KEPT,
    LOSS_SCALE,
    NOTICE,
    PER_REPLICA,
    STEP,
    ModelStateRule,
    TailLayout,
    accumulated,
    accumulator_dtypes,
    is_float,
    mapped,
    times_weight,
    travelling,
    weighted_terms,
    widened,
)
from strategies.jax.programs.feed_program import current_program
from strategies.jax.replicas.replica_context import replica_context
from strategies.jax.replicas.replicas import Replicas
from strategies.typing import AccumulationDtype, Batch, LossFunction, Tree, Variables
from strategies.values import Outcome

UNROLLED = 8
"""The most micro-batches that are unrolled in the program; in a loop, XLA:CPU takes longer for convolutions. With 8
micro-batches of a CNN, against 8 updates: unrolled 1.3 times the rows per second, in a loop 0.81 to 0.91."""

_NOTHING = jax.tree.structure(None)


def float_dtype(name: str, dtype: Any) -> np.dtype | None:
    """Return a floating-point dtype, or None for None.

    Raises:
        ValueError: `dtype` is anything else.
    """
    if dtype is None:
        return None
    try:
        found: np.dtype = np.dtype(dtype)
    except TypeError:
        found = np.dtype(object)
    if not is_float(found):
        raise ValueError(f"{name} is {dtype!r}; use None, 'bfloat16', 'float16' or another floating-point dtype")
    return found


def cast(tree: Tree, dtype: np.dtype | None) -> Tree:
    """Cast the floating-point arrays of a tree, for mixed precision (Micikevicius et al., 2018); None casts nothing."""
    if dtype is None:
        return tree
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree)


@dataclass(frozen=True)
class ReplicaShapes:
    """The shapes and dtypes of one replica's arguments.

    Attributes:
        variables: All variables.
        batch: Rows of the replica.
        model_state: Model state of the replica, or None.
    """

    variables: Variables
    batch: Batch
    model_state: Tree = None


class ReplicaProgram:
    """The gradient function of a trainer, for variables and batches of certain shapes.

    Its tail is as `TailLayout` says. If the loss function gives weights, gradients, loss and metrics are multiplied by
    them. With `check_numerics`, there is one flag for each variable and replica.

    Args:
        replicas: Replicas that run it.
        loss_fn: Loss function, see `Trainer`.
        shapes: Shapes of a replica's arguments.
        trainable: Choice of the trained variables.
        rule: Rule by which replicas agree on the model state.
        accumulation_dtype: Dtype in which gradients are accumulated, see `accumulator_dtypes`.
        options: Options of the step.

    Attributes:
        names: Names of the metrics; the first is "loss".
        places: Places of the values in the tail.
        trainable: Choice of the trained variables.
        options: Options of the step.
        rule: Rule by which replicas agree on the model state.
        num_micro_batches: Number of micro-batches of a step.
        gradient_dtypes: Dtypes in which gradients are accumulated and applied, for each trained variable.
        results: Shapes and dtypes of the averaged values that leave the replica, besides the tail: the gradients, then
            the averaged and added leaves of the model state.
        num_gradients: Number of results that are gradients.
        weighs_losses: Whether losses, and not their gradients, are multiplied by weights; known after tracing.
        has_feeds: Whether the loss function has feeds; known after tracing.
        is_independent: Whether the traced program may run on other instances and replicas, because the loss function
            has no collectives and no feeds; known after tracing.

    Raises:
        TypeError: The loss, a metric or the weight is not a scalar, or the new model state is not like the old one.
        ValueError: The batch cannot be divided into micro-batches, or lacks a key that the loss function reads; or
            gradients that are multiplied by weights would travel or be added as float16, which overflows.
    """

    def __init__(
        self,
        replicas: Replicas,
        loss_fn: LossFunction,
        shapes: ReplicaShapes,
        trainable: Trainable,
        rule: ModelStateRule,
        accumulation_dtype: AccumulationDtype,
        options: CommonOptions,
    ) -> None:
        self._replicas = replicas
        self._loss_fn = loss_fn
        self.trainable = trainable
        self.options = options
        self.rule = rule
        self._compute_dtype = float_dtype("compute_dtype", name_of_dtype(options.compute_dtype))
        self._scales_loss = options.scaling is not None
        self.num_micro_batches = int(options.gradient_accumulation_count)
        trained = trainable.pick(shapes.variables)
        self.gradient_dtypes = accumulator_dtypes(trained, accumulation_dtype)
        pairs = zip(jax.tree.leaves(trained), self.gradient_dtypes, strict=True)
        self.results = [jax.ShapeDtypeStruct(leaf.shape, options.transfer.dtype_of(dtype)) for leaf, dtype in pairs]
        self.num_gradients = len(self.results)
        self.results += rule.travelling(shapes.model_state)
        self.is_independent = True
        self.has_feeds = False
        self.weighs_losses = False
        self._has_collectives = False  # in the loss function; known after `_metric_names`
        flags = len(self.gradient_dtypes) * replicas.num_replicas_in_sync if options.check_numerics else 0
        self.names, is_weighted = self._metric_names(shapes)
        self.places = TailLayout(self.names, is_weighted, self._scales_loss, flags)
        if is_weighted:
            self._check_weighted_dtypes()
            if self._has_collectives:
                self.check_losses_scalable("the loss function gives weights and has collectives of replicas")

    @property
    def means(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes and dtypes of the mean gradients of all replicas, before they are cut into shards."""
        return self.results[: self.num_gradients]

    def __call__(
        self,
        variables: Variables,
        batch: Batch,
        index: jax.Array,
        control: jax.Array,
        own_state: Sequence[jax.Array] = (),
        model_state: Tree = None,
    ) -> tuple[jax.Array, ...]:
        """Return the tail, the results, and the kept values, which `unpack_kept` splits; traceable.

        Args:
            variables: All variables.
            batch: Batch of this replica, with the micro-batches one after another along the first axis.
            index: Index of this replica, an int32 scalar.
            control: Control words, see `control_words`.
            own_state: `per_replica` leaves of the model state, with a first axis of length 1.
            model_state: Other leaves of the model state, with None in the places of `per_replica` leaves.
        """
        key = self._key(index, control)
        with self._in_context(index):
            values, leaves, after = self._gradients(
                variables, batch, key, control, self.rule.with_own(model_state, [one[0] for one in own_state])
            )
        means, state = self.of_state(after)
        results = [leaf.astype(result.dtype) for leaf, result in zip(leaves, self.means, strict=True)]
        tail = self.tail(values, index, control, self.not_finite(results) if self.needs_flags else None)
        return (tail, *results, *means, *state)

    def of_state(self, after: Tree) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return the sent values and the kept values of a replica's new model state; traceable."""
        kept = [
            one[None] if reduction == PER_REPLICA else one
            for reduction in KEPT
            for one in self.rule.pick(after, reduction)
        ]
        return self.rule.sent(after, self._replicas.num_replicas_in_sync), kept

    @property
    def needs_flags(self) -> bool:
        """Whether the tail has flags for gradients that are not finite."""
        return self._scales_loss or self.options.check_numerics

    @staticmethod
    def not_finite(leaves: Sequence[jax.Array]) -> jax.Array:
        """Return whether each leaf has an element that is not finite, bool `[leaves]`; traceable."""
        return jnp.stack([~jnp.isfinite(leaf).all() for leaf in leaves])

    def tail(
        self, values: jax.Array, index: jax.Array, control: jax.Array, is_bad: jax.Array | None = None
    ) -> jax.Array:
        """Return the tail of a replica; traceable.

        Args:
            values: Loss and metrics.
            index: Index of the replica.
            control: Control words, see `control_words`.
            is_bad: Flags of gradients that are not finite; needed only with `needs_flags`.
        """
        tail = [values, control[NOTICE, None].astype(jnp.float32)]
        if is_bad is not None:
            flags = is_bad.any()[None]
            if self.options.check_numerics:  # never together with loss scaling
                flags = (is_bad[:, None] & (jnp.arange(self._replicas.num_replicas_in_sync) == index)).reshape(-1)
            tail.append(flags.astype(jnp.float32))
        return jnp.concatenate(tail)

    def _key(self, index: jax.Array, control: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(self.options.seed), control[STEP]), index)

    @contextmanager
    def _in_context(self, index: jax.Array) -> Iterator[None]:
        """Provide the replica context while the loss function is traced for a step."""
        context = self._replicas.new_context(index, "step")
        with replica_context(context):
            yield
        self.is_independent &= context.is_independent
        self.has_feeds |= context.has_feeds

    def loss_of_micro_batch(
        self,
        variables: Variables,
        part: Batch,
        number: jax.Array,
        index: jax.Array,
        control: jax.Array,
        model_state: Tree,
    ) -> tuple[jax.Array, jax.Array, Outcome]:
        """Return the differentiated value, the loss with the metrics, and the `Outcome` of one micro-batch; traceable.

        The differentiated value is multiplied by the weight, because stages have no gradients to multiply.

        Args:
            variables: All variables.
            part: Micro-batch.
            number: Number of the micro-batch, an int32 scalar.
            index: Index of the replica, an int32 scalar.
            control: Control words, see `control_words`.
            model_state: Model state of the replica for this micro-batch.
        """
        key = self._key(index, control)
        if self.num_micro_batches > 1:
            key = jax.random.fold_in(key, number)
        with self._in_context(index):
            loss, values, outcome = self._computed(variables, part, key, control, model_state)
        if self.places.is_weighted:
            loss, values = self._weighed(loss, values)
        return loss, values, outcome

    def micro_batch_of(self, batch: Batch) -> Tree:
        """Return the shapes of one micro-batch of a replica's batch.

        Raises:
            ValueError: The batch cannot be divided into micro-batches.
        """
        count = self.num_micro_batches

        def shape(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            rows = leaf.shape[0]
            if rows == 0:
                raise ValueError(f"a batch of shape {list(leaf.shape)} has no rows; each replica needs at least one")
            if rows % count:
                raise ValueError(
                    f"Detected a gradient accumulation operation with {count} micro-batches, but each replica has "
                    f"{rows} rows of the batch, which is not a multiple; give gradient_accumulation_count to "
                    "distribute_dataset too"
                )
            return jax.ShapeDtypeStruct((rows // count, *leaf.shape[1:]), leaf.dtype)

        return jax.tree.map(shape, batch)

    def unpack_kept(self, kept: Sequence[Tree]) -> Mapping[str, Sequence[Tree]]:
        """Return the leaves of the model state that a replica keeps, by their reduction."""
        rest = iter(kept)
        return {reduction: list(itertools.islice(rest, self.rule.reductions.count(reduction))) for reduction in KEPT}

    def _gradients(
        self, variables: Variables, batch: Batch, key: jax.Array, control: jax.Array, model_state: Tree
    ) -> tuple[jax.Array, Sequence[jax.Array], Tree]:
        trained = self.trainable.pick(variables)

        def of_micro_batch(
            part: Batch, key: jax.Array, model_state: Tree
        ) -> tuple[jax.Array, Sequence[jax.Array], Tree]:
            def loss(trained: Variables) -> tuple[jax.Array, tuple[jax.Array, Tree]]:
                every = self.trainable.put(variables, trained)
                value, values, outcome = self._computed(every, part, key, control, model_state)
                if self._weighs_before:
                    value, values = self._weighed(value, values)
                return value, (values, jax.tree.map(jnp.asarray, outcome.model_state))

            (_, (values, after)), tree = jax.value_and_grad(loss, has_aux=True)(trained)
            gradients = self._mapped(jax.tree.leaves(tree), jax.tree.leaves(trained), control)
            return values, self._times_weight(gradients, values), after

        count = self.num_micro_batches
        if count == 1:
            own, leaves, after = of_micro_batch(batch, key, model_state)
            return own, [leaf.astype(dtype) for leaf, dtype in zip(leaves, self.gradient_dtypes, strict=True)], after
        parts = jax.tree.map(lambda leaf: leaf.reshape(count, leaf.shape[0] // count, *leaf.shape[1:]), batch)
        program = current_program()

        def add(before: Tree, turn: Tree) -> tuple[Tree, None]:
            total, sums, model_state, token = before
            number, part = turn
            with program.inside(token):  # puts the feeds of a micro-batch behind those of the previous micro-batch
                own, new, model_state = of_micro_batch(part, jax.random.fold_in(key, number), model_state)
                token = program.token
            pairs = zip(sums, new, strict=True)
            sums = [accumulated(self.options.method, old, gradient, number, count) for old, gradient in pairs]
            return (total + own, sums, model_state, token), None

        pairs = zip(jax.tree.leaves(trained), self.gradient_dtypes, strict=True)
        sums = [jnp.zeros(leaf.shape, dtype) for leaf, dtype in pairs]
        start = (jnp.zeros(self.places.num_values, jnp.float32), sums, model_state, program.token)
        # A loop if replicas meet in micro-batches, because their collectives have the same names: unrolled, a replica
        # may reach that of the next micro-batch before that of this one.
        unroll = 1 if self._has_collectives or count > UNROLLED else count
        (total, sums, after, token), _ = jax.lax.scan(add, start, (jnp.arange(count), parts), unroll=unroll)
        program.advance(token)
        return total / count, sums, after

    def _mapped(
        self, gradients: Sequence[jax.Array], variables: Sequence[jax.Array], control: jax.Array
    ) -> list[jax.Array]:
        """Apply `map_gradient` to the gradients of a micro-batch, after division by the loss scale."""
        function = self.options.map_gradient
        if function is None or not self._scales_loss:
            return mapped(function, gradients, variables, self.needs_flags)
        scale = jax.lax.bitcast_convert_type(control[LOSS_SCALE], jnp.float32)
        plain = [widened(gradient) / scale for gradient in gradients]
        new = mapped(function, plain, variables, self.needs_flags)
        return [(one * scale).astype(gradient.dtype) for one, gradient in zip(new, gradients, strict=True)]

    @property
    def _weighs_before(self) -> bool:
        """Whether the loss is multiplied by its weight, not its gradients.

        If the loss function has collectives, a replica's gradients have parts of the losses of other replicas.
        """
        return self.places.is_weighted and self._has_collectives

    def _weighed(self, loss: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Multiply a loss, which is then differentiated, by its weight, the last of the values.

        The gradients of a loss that is not finite are NaN even if it is multiplied by 0; then the weight becomes NaN.
        """
        self.weighs_losses = True
        weight = values[self.places.weight]
        travelling = jnp.where((weight == 0) & ~jnp.isfinite(loss), jnp.nan, weight)
        return times_weight(loss, weight), jnp.append(values[: self.places.weight], travelling)

    def _times_weight(self, gradients: Sequence[jax.Array], values: jax.Array) -> Sequence[jax.Array]:
        """Multiply the gradients of a micro-batch by its weight, the last of the values."""
        if not self.places.is_weighted or self._weighs_before:
            return gradients
        # Behind barriers, one for each gradient: XLA computes it as without a weight, and it can leave early.
        apart = [jax.lax.optimization_barrier(gradient) for gradient in gradients]
        return [weighted_terms(each, values[self.places.weight]) for each in apart]

    def _called(self, variables: Variables, batch: Batch, key: jax.Array, model_state: Tree) -> Tree:
        """Call the loss function. The model state keeps its dtypes: moving means need them."""
        own = () if self.rule.structure == _NOTHING else (model_state,)
        return self._loss_fn(cast(variables, self._compute_dtype), cast(batch, self._compute_dtype), key, *own)

    def _computed(
        self, variables: Variables, batch: Batch, key: jax.Array, control: jax.Array, model_state: Tree
    ) -> tuple[jax.Array, jax.Array, Outcome]:
        outcome = Outcome.of(self._called(variables, batch, key, model_state))
        loss = outcome.loss
        values = jnp.asarray([loss, *(outcome.metrics[name] for name in self.names[1:])], jnp.float32)
        if outcome.weight is not None:
            weight = travelling(outcome.weight)
            values = jnp.append(weighted_terms(values, weight), weight)
        if self._scales_loss:
            loss = loss.astype(jnp.float32) * jax.lax.bitcast_convert_type(control[LOSS_SCALE], jnp.float32)
        return loss, values, outcome

    # ---- shapes

    def _metric_names(self, given: ReplicaShapes) -> tuple[tuple[str, ...], bool]:
        """Return the names of the loss and metrics, and whether there is a weight; check them and the model state."""
        micro_batch = self.micro_batch_of(given.batch)
        with naming_missing_keys(given.variables, given.batch):
            shapes = jax.eval_shape(self._loss_of_one, given.variables, micro_batch, np.int32(0), given.model_state)
        outcome = Outcome.of(shapes)
        loss, metrics = outcome.loss, outcome.metrics
        if not isinstance(loss, jax.ShapeDtypeStruct) or not isinstance(metrics, Mapping):
            returned = jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", shapes)
            raise TypeError(
                f"the loss function returns {returned}; it must return the loss, or the loss and a dictionary of "
                "metrics, or a strategies.Outcome"
            )
        if loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
            raise TypeError(
                f"the loss is {loss.dtype}{list(loss.shape)}; it must be a floating-point scalar: take jnp.mean of it"
            )
        self.rule.check_returned(given.model_state, outcome.model_state)
        if outcome.weight is not None:
            check_weight(outcome.weight)
        return ("loss", *metric_names(metrics)), outcome.weight is not None

    def _check_weighted_dtypes(self) -> None:
        """Raise if gradients that are multiplied by weights, such as numbers of tokens, pass through float16."""
        if np.dtype(np.float16) in (np.dtype(dtype) for dtype in self.gradient_dtypes):
            raise ValueError(
                "the loss function gives weights, but gradients are kept as float16, which overflows when they are "
                "multiplied by large weights; use gradient_accumulation_dtype='float32', or no weights"
            )
        if any(self.options.transfer.dtype_of(dtype) == np.float16 for dtype in self.gradient_dtypes):
            raise ValueError(
                "the loss function gives weights, but gradients travel as float16, which overflows when they are "
                "multiplied by large weights; use gradient_transfer_dtype='bfloat16', or no weights"
            )

    def check_losses_scalable(self, because: str) -> None:
        """Raise if a loss cannot be multiplied by its weight before its gradients are computed.

        Args:
            because: Reason for messages.

        Raises:
            ValueError: If `map_gradient` would get weighted gradients, or the loss is computed in float16.
        """
        if self.options.map_gradient is not None:
            raise ValueError(
                f"{because}, so map_gradient would get gradients that weights have multiplied; use only one of them"
            )
        if self._compute_dtype == jnp.float16:
            raise ValueError(
                f"{because}, so the loss is multiplied by large weights, which overflow in float16; use "
                "compute_dtype='bfloat16', or no weights"
            )

    def _loss_of_one(self, variables: Variables, batch: Batch, index: jax.Array, model_state: Tree) -> Tree:
        """Return the results of the loss function for one micro-batch, as arrays."""
        context = self._replicas.new_context(index, "shapes")
        with replica_context(context):
            result = self._called(variables, batch, jax.random.key(0), model_state)
        self._has_collectives |= context.has_collectives
        try:
            return jax.tree.map(jnp.asarray, result)
        except TypeError as error:
            raise TypeError(
                f"the loss function returns {result}; it must return the loss, or the loss and a dictionary of "
                "metrics, or a strategies.Outcome, all of them arrays or numbers"
            ) from error
