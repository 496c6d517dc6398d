"""A worker of the training benchmarks, which trains with a strategy of this project or alone with JAX.

usage: training_jax.py single|popdist|horovod|multi-worker SOCKET MODEL BATCH_SIZE [GRADIENT_TRANSFER_DTYPE]
       training_jax.py alone SOCKET MODEL BATCH_SIZE RANK RANKS
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import control
import jax
import numpy as np
import optax
import training_task

from popdist.examples.digits_models import MODELS

if TYPE_CHECKING:
    import strategies

Batch = Any
Answer = dict[str, Any]


def main() -> None:
    kind, path, model, batch_size, *place = sys.argv[1:]
    if kind == "alone":
        rank, ranks = map(int, place)
        alone = Alone(model, int(batch_size), rank, ranks)
        control.serve(path, kind, rank, {"alone": alone.run})
    else:
        ours = Ours(kind, model, int(batch_size), *place)
        handlers: dict[str, Callable[..., Any]] = {
            "placed": ours.placed,
            "dataset": ours.from_dataset,
            "saved": ours.saved,
            "fingerprint": ours.fingerprint,
        }
        control.serve(path, "ours", ours.strategy.instance_index, handlers)


class Ours:
    """Training steps with one replica per instance, one of our strategies and `Trainer`."""

    def __init__(self, kind: str, model: str, batch_size: int, transfer_dtype: str | None = None) -> None:
        import strategies

        self._fingerprint_of = strategies.fingerprint
        self.strategy = STRATEGIES[kind]()
        optimizer = optax.adam(training_task.LEARNING_RATE)
        self._trainer = strategies.Trainer(
            self.strategy, loss_of(model), optimizer, gradient_transfer_dtype=transfer_dtype
        )
        self._state = self._trainer.init(first_variables(model))
        arrays = training_task.dataset(batch_size, self.strategy.num_replicas_in_sync)
        self._dataset = self.strategy.distribute_dataset(arrays, batch_size=batch_size, shuffle=False)
        self._placed = itertools.cycle(list(self._dataset.epoch(0)))
        self._checkpoints: strategies.Checkpoints | None = None

    def placed(self, steps: int) -> Answer:
        """Make steps on batches that are on the device."""
        return self._train(itertools.islice(self._placed, steps))

    def from_dataset(self, steps: int) -> Answer:
        """Make steps on batches that the data set gathers, prefetches and places."""
        return self._train(itertools.islice(self._read(), steps))

    def saved(self, steps: int, every: int, folder: str) -> Answer:
        """Make steps on batches on the device with a checkpoint every `every` steps, and time the calls for them."""
        if self._checkpoints is None:
            import strategies

            self._checkpoints = strategies.Checkpoints(folder, self._trainer, self._dataset, every=every)
        calls_s: list[float] = []
        made: set[int | None] = set()

        def after_step(state: strategies.TrainState) -> None:
            began = time.perf_counter()
            self._checkpoints.after_step(state)
            calls_s.append(time.perf_counter() - began)
            made.add(self._checkpoints.last_step)

        made_before = self._checkpoints.last_step
        answer = self._train(itertools.islice(self._placed, steps), after_step)
        self._checkpoints.wait()
        return {**answer, "blocked_s": sum(calls_s), "made": len(made - {made_before})}

    def fingerprint(self) -> str:
        """Return the fingerprint of the variables."""
        return self._fingerprint_of(self._state.variables)

    def _read(self) -> Iterator[Batch]:
        for epoch in itertools.count():
            yield from self._dataset.epoch(epoch)

    def _train(self, batches: Iterator[Batch], after_step: Callable[[Any], None] = lambda state: None) -> Answer:
        self.strategy.communicator.barrier()
        losses = []
        state = self._state
        began = time.perf_counter()
        for batch in batches:
            state, metrics = self._trainer.step(state, batch)
            losses.append(metrics)
            after_step(state)
        jax.block_until_ready(state.variables)
        seconds = time.perf_counter() - began
        self._state = state
        return {"seconds": seconds, "losses": [metrics["loss"] for metrics in losses]}


def single_strategy() -> strategies.Strategy:
    """Return a strategy of one replica."""
    import strategies

    return strategies.LocalStrategy(1)


def popdist_strategy() -> strategies.Strategy:
    """Return a strategy under poprun, over MPI."""
    import strategies

    return strategies.PopDistStrategy()


def horovod_strategy() -> strategies.Strategy:
    """Return a strategy under poprun, over Horovod."""
    import strategies

    return strategies.IPUHorovodStrategy()


def multi_worker_strategy() -> strategies.Strategy:
    """Return a strategy with TF_CONFIG, over gRPC."""
    import popdist
    import strategies

    return strategies.IPUMultiWorkerStrategy(popdist.TFConfigClusterResolver())


STRATEGIES: dict[str, Callable[[], strategies.Strategy]] = {
    "single": single_strategy,
    "popdist": popdist_strategy,
    "horovod": horovod_strategy,
    "multi-worker": multi_worker_strategy,
}


class Alone:
    """Training steps of one replica, fused into one program, without other processes."""

    def __init__(self, model: str, batch_size: int, rank: int, ranks: int) -> None:
        self._optimizer = optax.adam(training_task.LEARNING_RATE)
        self._loss = loss_of(model)
        self._step = jax.jit(self._update, donate_argnums=(0, 1))
        self._variables = jax.device_put(first_variables(model))
        self._optimizer_state = jax.jit(self._optimizer.init)(self._variables)
        batches = training_task.batches_of(rank, batch_size, ranks)
        self._batches = itertools.cycle([jax.device_put(batch) for batch in batches])

    def run(self, steps: int) -> Answer:
        """Make steps on batches that are on the device."""
        losses = []
        variables, optimizer_state = self._variables, self._optimizer_state
        began = time.perf_counter()
        for batch in itertools.islice(self._batches, steps):
            variables, optimizer_state, loss = self._step(variables, optimizer_state, batch)
            losses.append(loss)
        jax.block_until_ready((variables, optimizer_state, loss))
        seconds = time.perf_counter() - began
        self._variables, self._optimizer_state = variables, optimizer_state
        return {"seconds": seconds, "losses": [float(loss) for loss in losses]}

    def _update(self, variables: Any, optimizer_state: Any, batch: Batch) -> tuple[Any, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(self._loss)(variables, batch)
        changes, optimizer_state = self._optimizer.update(gradients, optimizer_state, variables)
        return optax.apply_updates(variables, changes), optimizer_state, loss


def loss_of(model: str) -> Callable[..., jax.Array]:
    """Return a loss function: the mean cross-entropy of a batch."""
    apply = MODELS[model].apply

    def loss_fn(variables: Any, batch: Batch, key: jax.Array | None = None) -> jax.Array:
        logits = apply(variables, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    return loss_fn


def first_variables(model: str) -> training_task.Arrays:
    """Return the task's variables, after a check that the example model has the same shapes."""
    variables = training_task.first_variables(model)
    expected = jax.eval_shape(lambda: MODELS[model].init(0, training_task.IMAGE_SHAPE))
    if jax.tree.map(np.shape, variables) != jax.tree.map(lambda leaf: leaf.shape, expected):
        raise SystemExit(f"the variables of {model} differ from those of the example model: {expected}")
    return variables


if __name__ == "__main__":
    main()
