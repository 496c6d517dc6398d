"""The training step: gradients per replica, one ordered all-reduce, one update per instance."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from strategies.errors import NonFiniteGradientError
from strategies.gradients import Allocate, Arguments, GradientPrograms
from strategies.replica_context import replica_context
from strategies.strategy import Strategy

logger = logging.getLogger(__name__)

LossFunction = Callable[[Any, Any, jax.Array], Any]


@partial(jax.tree_util.register_dataclass, data_fields=["variables", "optimizer_state"], meta_fields=["step"])
@dataclass(frozen=True)
class TrainState:
    """Everything that training changes.

    Attributes:
        variables: a pytree of arrays, the same bits on every instance.
        optimizer_state: what the optimizer keeps.
        step: how many updates were made.
    """

    variables: Any
    optimizer_state: Any
    step: int


class Metrics(Mapping[str, float]):
    """Means over all replicas, under "loss" and the names that the loss function gave."""

    def __init__(self, names: tuple[str, ...], means: np.ndarray) -> None:
        self._names = names
        self._means = means

    def __getitem__(self, name: str) -> float:
        try:
            position = self._names.index(name)
        except ValueError:
            raise KeyError(name) from None
        return float(self._means[position])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"Metrics({dict(self)})"


@dataclass(frozen=True)
class _Step:
    """A step compiled for the shapes of one batch.

    Attributes:
        gradients: computes the gradients.
        update: (variables, optimizer state, mean gradients) -> the first two anew, and a token that is ready
            when they are.
        means: where the mean gradients are, as a pytree like the variables.
        names: of the metrics.
    """

    gradients: GradientPrograms
    update: Callable[..., Any]
    means: Any
    names: tuple[str, ...]


class Trainer:
    """Trains variables on all replicas of a strategy.

    Each step runs `loss_fn` once per replica; the gradients leave XLA as views of its memory, one flat buffer per
    dtype with the metrics in its tail; the buffers are added in replica order; one compiled update per instance applies
    their mean. The variables have the same bits on every instance, and for every number of instances.

    Args:
        strategy: where the replicas are.
        loss_fn: `(variables, batch, key) -> loss` or `-> (loss, {name: scalar})` for one replica and one micro-batch;
            the loss is a scalar, the key differs for each replica and step.
        optimizer: an optax gradient transformation.
        seed: of the keys.
        check_numerics: raise `NonFiniteGradientError` for the first gradient that is NaN or infinite.
    """

    def __init__(
        self,
        strategy: Strategy,
        loss_fn: LossFunction,
        optimizer: optax.GradientTransformation,
        seed: int = 0,
        check_numerics: bool = False,
    ) -> None:
        self._strategy = strategy
        self._devices = strategy.devices
        self._loss_fn = loss_fn
        self._optimizer = optimizer
        self._seed = seed
        self._check_numerics = check_numerics
        self._steps: dict[Any, _Step] = {}
        self._indices = np.array(strategy.local_replicas, np.int32)
        self._updated: jax.Array | None = None

    def init(self, variables: Any) -> TrainState:
        """The first state: instance 0's variables on every instance.

        Args:
            variables: a pytree of floating-point arrays, with the same shapes and dtypes on all instances.

        Raises:
            TypeError: if a variable is not of a floating-point dtype.
            LayoutMismatchError: on all instances if their variables differ in names, shapes or dtypes.
        """
        for path, leaf in jax.tree_util.tree_leaves_with_path(variables):
            if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
                raise TypeError(
                    f"variable {jax.tree_util.keystr(path)} is of dtype {jnp.result_type(leaf)}; only floating-point "
                    "variables can be trained: keep others outside"
                )
        shared = self._strategy.broadcast(variables)
        with jax.default_device(self._strategy.variables_device):
            optimizer_state = jax.jit(self._optimizer.init)(shared)
        return TrainState(shared, optimizer_state, 0)

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """One update; `state` is used up.

        Args:
            state: what `init` or `step` returned last.
            batch: this instance's batch: a pytree whose leaves have the micro-batches of the local replicas one after
                another along their first axis.

        Returns:
            The new state, and the metrics as means over all replicas.

        Raises:
            TypeError: if the loss is not a floating-point scalar.
            ValueError: if the batch cannot be divided among the local replicas.
            NonFiniteGradientError: with `check_numerics`; the state is then unchanged and still usable.
        """
        self._strategy.progress.step(state.step)
        step = self._compiled(state, batch)
        shared = self._begin(step.gradients, state, batch)
        for bucket, contributions in step.gradients.collect():
            if self._updated is not None:
                self._updated.block_until_ready()  # the last update may still be reading the results
            for buffer, arrays, result in zip(bucket.layout.buffers, contributions, bucket.results, strict=True):
                if buffer.size:
                    name = f"{bucket.name}/{buffer.name}"
                    self._strategy.communicator.ordered_all_reduce(arrays, result, "mean", name=name)
        del shared  # not before XLA has read it: what it lets go itself is too late for the update to take over
        tail = step.gradients.tail.copy()
        if self._check_numerics:
            self._raise_if_not_finite(state, tail[len(step.names) :])
        variables, optimizer_state, self._updated = step.update(state.variables, state.optimizer_state, step.means)
        metrics = Metrics(step.names, tail)
        return TrainState(variables, optimizer_state, state.step + 1), metrics

    def _begin(self, gradients: GradientPrograms, state: TrainState, batch: Any) -> Any:
        """Have the gradients of all local replicas computed; the variables as the devices see them."""
        shared = self._devices.share(state.variables)
        parts = zip(self._devices.cut_into_waves(batch), self._devices.cut_into_waves(self._indices), strict=True)
        for wave, (part, indices) in enumerate(parts):
            gradients.dispatch((shared, part, indices, np.int32(state.step)), wave)
        return shared

    # ---- compiling

    def _compiled(self, state: TrainState, batch: Any) -> _Step:
        leaves, structure = jax.tree.flatten((state.variables, batch))
        key = (structure, tuple([(leaf.shape, leaf.dtype) for leaf in leaves]))
        found = self._steps.get(key)
        if found is None:
            found = self._steps[key] = self._compile(state, batch)
        return found

    def _compile(self, state: TrainState, batch: Any) -> _Step:
        names, has_metrics = self._metric_names(state.variables, jax.tree.map(self._wave_shape, batch))
        variables = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state.variables)
        count = len(jax.tree.leaves(variables))
        flags = count * self._strategy.num_replicas_in_sync if self._check_numerics else 0
        arguments = Arguments(
            (variables, jax.tree.map(self._wave_shape, batch), self._wave_of_indices(), np.int32(0)),
            (False, True, True, False),
        )
        function = self._gradient_function(names, has_metrics)

        def programs(streams: bool, allocate: Allocate) -> GradientPrograms:
            return GradientPrograms(self._devices, function, arguments, streams, len(names) + flags, allocate)

        streams = self._strategy.streams_gradients and self._is_streaming_exact(programs, state, batch)
        gradients = programs(streams, self._strategy.communicator.allocate)
        return _Step(
            gradients=gradients,
            update=jax.jit(self._update, donate_argnums=(0, 1)),
            means=jax.tree.unflatten(jax.tree.structure(variables), gradients.means),
            names=names,
        )

    def _is_streaming_exact(
        self, programs: Callable[[bool, Allocate], GradientPrograms], state: TrainState, batch: Any
    ) -> bool:
        """Whether the gradients of this batch have the same bits when they are streamed, on all instances.

        XLA fuses and contracts what lies in one program; cut elsewhere, some models round differently (seen with
        attention and dropout). A collective call.
        """
        cut = programs(True, np.empty)
        if len(cut.buckets) == 1:
            return False
        streamed = self._gradients_of(cut, state, batch)
        whole = self._gradients_of(programs(False, np.empty), state, batch)
        pairs = zip(itertools.chain(*streamed), itertools.chain(*whole), strict=True)
        is_exact = np.array([all(one.tobytes() == other.tobytes() for one, other in pairs)], np.int8)
        self._strategy.communicator.all_reduce(is_exact, "min", name="streamed gradients have the same bits")
        if not is_exact[0]:
            logger.info("gradients are not streamed: computed in parts they would have other bits")
        return bool(is_exact[0])

    def _gradients_of(self, programs: GradientPrograms, state: TrainState, batch: Any) -> list[list[np.ndarray]]:
        shared = self._begin(programs, state, batch)
        leaves = programs.leaves()
        del shared
        return leaves

    def _wave_shape(self, leaf: Any) -> jax.ShapeDtypeStruct:
        """The part of a batch that one wave of replicas takes."""
        local = len(self._indices)
        if not leaf.ndim or leaf.shape[0] % local:
            raise ValueError(
                f"a batch of shape {list(leaf.shape)} for {local} local replicas; "
                "its first axis must be a multiple of their number"
            )
        rows = leaf.shape[0] // self._devices.waves
        return jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), jax.dtypes.canonicalize_dtype(leaf.dtype))

    def _metric_names(self, variables: Any, batch: Any) -> tuple[tuple[str, ...], bool]:
        """What the loss function returns besides the loss; checks that all of it is scalar."""
        shapes = jax.eval_shape(
            self._devices.compile(self._loss_program, (False, True, True)), variables, batch, self._wave_of_indices()
        )
        loss, metrics = shapes if isinstance(shapes, tuple) else (shapes, {})
        if loss.shape[1:] != () or not jnp.issubdtype(loss.dtype, jnp.floating):
            raise TypeError(
                f"the loss is {loss.dtype}{list(loss.shape[1:])}; "
                "it must be a floating-point scalar: take jnp.mean of it"
            )
        for name, metric in metrics.items():
            if metric.shape[1:] != () or name == "loss":
                raise TypeError(
                    f"metric {name!r} is of shape {list(metric.shape[1:])}; metrics are scalars not called 'loss'"
                )
        return ("loss", *metrics), isinstance(shapes, tuple)

    def _loss_program(self, variables: Any, batch: Any, index: jax.Array) -> Any:
        """What the loss function returns, with the replicas along a new first axis."""
        with replica_context(self._strategy.new_context(index[0], "shapes")):
            result = self._loss_fn(variables, batch, jax.random.key(0))
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], result)

    def _wave_of_indices(self) -> np.ndarray:
        return self._indices[: self._devices.width]

    def _gradient_function(self, names: tuple[str, ...], has_metrics: bool) -> Callable[..., Any]:
        total = self._strategy.num_replicas_in_sync

        def gradients(variables: Any, batch: Any, index: jax.Array, step: jax.Array) -> tuple[jax.Array, ...]:
            replica = index[0]
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self._seed), step), replica)
            with replica_context(self._strategy.new_context(replica, "step")):
                result, tree = jax.value_and_grad(self._loss_fn, has_aux=has_metrics)(variables, batch, key)
            loss, metrics = result if has_metrics else (result, {})
            leaves = jax.tree.leaves(tree)
            tail = [jnp.asarray([loss, *(metrics[name] for name in names[1:])], jnp.float32)]
            if self._check_numerics:
                is_bad = jnp.stack([~jnp.isfinite(leaf).all() for leaf in leaves])
                tail.append((is_bad[:, None] & (jnp.arange(total) == replica)).astype(jnp.float32).reshape(-1))
            return (jnp.concatenate(tail), *leaves)

        return gradients

    def _update(self, variables: Any, optimizer_state: Any, means: Any) -> tuple[Any, Any, jax.Array]:
        changes, optimizer_state = self._optimizer.update(means, optimizer_state, variables)
        return optax.apply_updates(variables, changes), optimizer_state, jnp.zeros(())

    def _raise_if_not_finite(self, state: TrainState, flags: np.ndarray) -> None:
        if not flags.any():
            return
        leaf, replica = divmod(int(np.flatnonzero(flags)[0]), self._strategy.num_replicas_in_sync)
        path, _ = jax.tree_util.tree_leaves_with_path(state.variables)[leaf]
        replicas = np.flatnonzero(flags.reshape(-1, self._strategy.num_replicas_in_sync).any(axis=0)).tolist()
        raise NonFiniteGradientError(
            f"the gradient of variable {jax.tree_util.keystr(path)} on replica {replica} is not finite at step "
            f"{state.step} (first of the replicas {replicas}); the step was not applied: lower the learning rate, "
            "clip the gradients, or look at that replica's batch"
        )
