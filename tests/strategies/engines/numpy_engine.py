"""A small engine in NumPy: a linear model with squared loss, trained by SGD with momentum."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar, final

import numpy as np

from strategies.core.engine import Buffers, Engine, EvaluationTask, ExchangeResult, PendingBatch
from strategies.core.metrics import Layers
from strategies.core.step import StepRules
from strategies.data.sources import Masked
from strategies.errors import NonFiniteGradientError
from strategies.exchange.flat import FlatLayout, GradientTransfer
from strategies.exchange.means import Bucket, Means
from strategies.jax.evaluation.mean import Mean
from strategies.jax.replicas.replicas import Replicas, row_results
from strategies.loss_scaling import LossScale, LossScaling
from strategies.values import TrainState

RATE, MOMENTUM = 0.05, 0.9
TAIL = 2
"""Values after the last bucket: the loss, and whether the instance was given a notice."""

NAMES = ("b", "w")
"""The biases and the weights, in the order in which their gradients leave."""

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class NumpyOptions:
    """Options of a step, with the names and meanings of `StepOptions`."""

    check_numerics: bool = False
    digest_every: int = 0
    replicated_optimizer_state_sharding: bool = False
    loss_scaling: LossScaling | None = None
    gradient_transfer_dtype: str | None = None
    before_loss: Callable[[], object] = lambda: None

    @property
    def rules(self) -> StepRules[TrainState]:
        """The rules of the loop's steps."""
        unrecoverable_part = "sharded optimizer state" if self.replicated_optimizer_state_sharding else None
        return StepRules(
            self.digest_every, self.check_numerics, unrecoverable_part, flipped, lambda batch: len(batch["x"])
        )


@dataclass
class NumpyPending:
    """A pending step of the NumPy engine."""

    state: TrainState
    buckets: Iterator[tuple[Bucket, Buffers]]
    exchange: Means
    means: Arrays = field(default_factory=dict)
    is_finite: bool = True


@final
class NumpyEngine(Engine[TrainState, NumpyPending]):
    """An engine that computes one replica after another; a step makes a new state of arrays."""

    def __init__(self, replicas: Replicas, options: NumpyOptions) -> None:
        self._replicas, self._options = replicas, options
        self._is_sharded = options.replicated_optimizer_state_sharding
        self._transfer = GradientTransfer.parse(options.gradient_transfer_dtype)
        self._buckets: dict[str, Bucket] = {}

    def begin(self, state: TrainState, batch: Arrays, notice: bool) -> NumpyPending:
        if not self._buckets:
            self._buckets = {name: self._bucket(name, state.variables[name]) for name in NAMES}
        means = Means(self._replicas.communicator)
        return NumpyPending(state, self._gradients(state, batch, notice), means)

    def _bucket(self, name: str, array: np.ndarray) -> Bucket:
        layout = FlatLayout((array.shape,), (self._transfer.dtype_of(array.dtype),), TAIL if name == "w" else 0)
        return Bucket(f"gradients/{name}", layout, tuple(_memory(layout)), frozenset())

    def _gradients(self, state: TrainState, batch: Arrays, notice: bool) -> Iterator[tuple[Bucket, Buffers]]:
        self._options.before_loss()
        count, scale = len(self._replicas.local_replicas), _scale_of(state)
        inputs, wanted = ([part.copy() for part in np.split(np.asarray(batch[name]), count)] for name in ("x", "y"))
        with np.errstate(all="ignore"):  # `finish_exchange` finds values that are not finite
            errors = [x @ state.variables["w"] + state.variables["b"] - y for x, y in zip(inputs, wanted, strict=True)]
            to_outputs = [error * (2 * scale / np.float32(error.size)) for error in errors]
            tails = [(np.mean(error**2), float(notice)) for error in errors]
            biases = self._packed("b", [each.sum(axis=0) for each in to_outputs], [()] * count)
            weights = self._packed("w", [x.T @ each for x, each in zip(inputs, to_outputs, strict=True)], tails)
        yield from (biases, weights)

    def _packed(self, name: str, gradients: list[np.ndarray], tails: list[tuple[float, ...]]) -> tuple[Bucket, Buffers]:
        bucket = self._buckets[name]
        of_replicas = [_memory(bucket.layout) for _ in gradients]
        for buffers, gradient, tail in zip(of_replicas, gradients, tails, strict=True):
            bucket.layout.view(0, buffers)[...] = gradient
            bucket.layout.tail_view(buffers)[...] = tail
        return bucket, list(zip(*of_replicas, strict=True))

    def finish_exchange(self, pending: NumpyPending) -> ExchangeResult:
        for name, bucket in self._buckets.items():
            mean = bucket.layout.view(0, bucket.results).astype(np.float32)
            pending.means[name] = mean / _scale_of(pending.state)
        bad = [name for name, mean in pending.means.items() if not np.isfinite(mean).all()]
        found = self._replicas.communicator.all_reduce(np.array([len(bad)]), "max", name="gradients not finite")
        if self._options.check_numerics and found[0]:
            raise NonFiniteGradientError(f"the gradient of {bad[0]} is not finite at step {pending.state.step}")
        pending.is_finite = not (self._options.loss_scaling and found[0])
        bucket = self._buckets["w"]
        tail = bucket.layout.tail_view(bucket.results).copy()
        return ExchangeResult(("loss",), tail, float(tail[1]), pending.is_finite, lambda: (pending.means, None))

    def layers(self, state: TrainState, pending: NumpyPending, result: ExchangeResult) -> Layers:
        names = tuple(state.variables)
        return Layers(names, [state.variables[name] for name in names], [pending.means[name] for name in names])

    def update(self, pending: NumpyPending, scale: LossScale | None) -> TrainState:
        state = pending.state
        if not pending.is_finite:
            return replace(state, step=state.step + 1, loss_scale=scale)
        variables, velocities = {}, {}
        for name, array in state.variables.items():
            velocities[name] = MOMENTUM * state.optimizer_state[name] + self._own(pending.means[name])
            part = self._own(array) - RATE * velocities[name]
            variables[name] = self._gathered(name, part)[: array.size].reshape(array.shape)
        return TrainState(variables, velocities, state.step + 1, scale)

    def _own(self, array: np.ndarray) -> np.ndarray:
        """Return the flat elements whose velocity this instance keeps, padded to equal parts per replica."""
        if not self._is_sharded:
            return array.reshape(-1)
        replicas = self._replicas.num_replicas_in_sync
        flat = np.resize(array, -(-array.size // replicas) * replicas).reshape(replicas, -1)
        return flat[self._replicas.local_replicas].reshape(-1)

    def _gathered(self, name: str, part: np.ndarray) -> np.ndarray:
        return self._replicas.communicator.all_gather(part, name=name).reshape(-1) if self._is_sharded else part

    def begin_task(self, task: EvaluationTask, state: TrainState, batch: Masked) -> PendingBatch:
        count = len(self._replicas.local_replicas)
        values = [np.split(np.asarray(batch.values[name]), count) for name in ("x", "y")]
        masks = np.split(np.asarray(batch.mask), count)
        parts = zip(*values, masks, strict=True)
        return PendingBatch(
            lambda: [row_results(task.host_results(task(state, x, y), mask), mask) for x, y, mask in parts]
        )

    def share(self, state: TrainState, root: int) -> TrainState:
        scale = state.loss_scale
        numbers = [state.step] if scale is None else [state.step, scale.scale, scale.good_steps, scale.skipped]
        got = {name: array.copy() for name, array in self.digest(state).items()}
        got["numbers"] = np.array(numbers, np.float64)
        for name, array in got.items():
            self._replicas.communicator.broadcast(array, root, name=name)
        step, *numbers = got["numbers"].tolist()
        velocities = {name: got.get(f"velocity/{name}", state.optimizer_state[name]) for name in NAMES}
        scale = LossScale(np.float32(numbers[0]), *map(np.int32, numbers[1:])) if numbers else None
        return TrainState({name: got[name] for name in NAMES}, velocities, int(step), scale)

    def digest(self, state: TrainState) -> Arrays:
        velocities = {} if self._is_sharded else state.optimizer_state
        return dict(state.variables) | {f"velocity/{name}": array for name, array in velocities.items()}

    def snapshot(self, state: TrainState) -> TrainState:
        return state

    def restore(self, snapshot: TrainState) -> TrainState:
        zeros = {name: np.zeros_like(array) for name, array in snapshot.variables.items()}
        velocities = {name: self._own(array) for name, array in (snapshot.optimizer_state or zeros).items()}
        scaling = self._options.loss_scaling
        scale = snapshot.loss_scale or (None if scaling is None else scaling.start())
        return replace(snapshot, optimizer_state=velocities, loss_scale=scale)


@dataclass(frozen=True)
class NumpyRows(EvaluationTask):
    """An evaluation function: the mean loss, or the outputs, of each row."""

    title: ClassVar[str] = "evaluation"
    is_prediction: bool

    def __call__(self, state: TrainState, x: np.ndarray, y: np.ndarray) -> Arrays:
        outputs = np.stack([row @ state.variables["w"] + state.variables["b"] for row in x])
        return {"outputs": outputs, "loss": ((outputs - y) ** 2).mean(axis=1)}

    def host_results(self, computed: Arrays, mask: np.ndarray) -> object:
        if self.is_prediction:
            return computed["outputs"]
        return {"loss": Mean(np.float64(sum(computed["loss"][mask].tolist())), np.float64(mask.sum()))}


def flipped(state: TrainState) -> TrainState:
    """Return the state with one bit changed."""
    weights = state.variables["w"].copy()
    weights.reshape(-1).view(np.int32)[0] ^= 1 << 16
    return replace(state, variables=state.variables | {"w": weights})


def _scale_of(state: TrainState) -> np.float32:
    return np.float32(1 if state.loss_scale is None else state.loss_scale.scale)


def _memory(layout: FlatLayout) -> list[np.ndarray]:
    return [np.zeros(buffer.size, buffer.dtype) for buffer in layout.buffers]
