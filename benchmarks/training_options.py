"""The cost and gain of options of `Trainer`, in one process with one replica, against training without them.

    python benchmarks/training_options.py [--models cnn mlp] [--only accumulation executions] [--rounds 9]

* accumulation: one update of 8 micro-batches against 8 updates: rows per second, and the bytes of gradients that
  instances would exchange.
* executions: `Trainer.run(steps_per_execution=50)` against a loop of 50 steps, written by hand with `jax.lax.scan` and
  jitted, and against 50 calls of `Trainer.step`. All read batches that are on the device.

Ways take turns; figures are medians over the rounds, and ratios are ratios of medians.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import training_task
from timing import Machine, command_line, medians
from training_jax import first_variables, loss_of

import strategies  # isort: skip  # timing makes the project importable

COUNT = 8
SETTINGS = ("batch_size", "rounds", "steps")

Batch = dict[str, Any]
Way = Callable[[], None]


def main() -> None:
    """Print a table for each kind and model."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--models", nargs="+", choices=training_task.MODELS, default=list(training_task.MODELS), help="(all)"
    )
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=list(MEASURES), help="options to measure (all)")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each way (%(default)s)")
    parser.add_argument("--steps", type=int, default=50, help="steps of an execution (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, help="rows of a batch (%(default)s)")
    options = parser.parse_args()
    strategy = strategies.LocalStrategy(1)
    machine = Machine()
    figures = {}
    for model, kind in itertools.product(options.models, options.only):
        print(f"\n{model}, {kind}", flush=True)
        figures[f"{kind} of {model}, s"] = MEASURES[kind](strategy, model, options)
    machine.write(options, SETTINGS, **figures)


def accumulation(strategy: strategies.Strategy, model: str, options: argparse.Namespace) -> dict[str, float]:
    """Print rows per second and bytes of gradients, and return the times."""
    batches = placed_batches(strategy, options.batch_size, COUNT)
    joined = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    whole = strategy.replicas.devices.place(joined)
    apart, together = Training(strategy, model), Training(strategy, model, gradient_accumulation_count=COUNT)
    ways: dict[str, Way] = {"apart": lambda: apart.steps(batches), "together": lambda: together.steps([whole])}
    times = take_turns(ways, options.rounds)
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(first_variables(model)))
    rows = COUNT * options.batch_size
    print(f"{COUNT} updates           {rows / times['apart']:10.0f} rows/s {COUNT * nbytes:12,d} bytes of gradients")
    print(f"1 update, {COUNT} times   {rows / times['together']:10.0f} rows/s {nbytes:12,d} bytes of gradients")
    print(f"throughput {times['apart'] / times['together']:.3f}x, bytes 1/{COUNT}")
    return times


def executions(strategy: strategies.Strategy, model: str, options: argparse.Namespace) -> dict[str, float]:
    """Print milliseconds per step, and return the times."""
    batches = placed_batches(strategy, options.batch_size, options.steps)
    run, single = Training(strategy, model), Training(strategy, model)
    by_hand = ByHand(model, batches)
    ways: dict[str, Way] = {
        "run": lambda: run.run(batches),
        "by hand": by_hand.run,
        "step": lambda: single.steps(batches),
    }
    times = take_turns(ways, options.rounds)
    for name, seconds in times.items():
        print(f"{name:10} {seconds / options.steps * 1e3:8.3f} ms per step  {seconds / times['by hand']:.3f}x by hand")
    return times


class Training:
    """A training by `Trainer` that continues from call to call."""

    def __init__(self, strategy: strategies.Strategy, model: str, **options: Any) -> None:
        optimizer = optax.adam(training_task.LEARNING_RATE)
        self._trainer = strategies.Trainer(strategy, loss_of(model), optimizer, **options)
        self._state = self._trainer.init(first_variables(model))

    def steps(self, batches: Sequence[Batch]) -> None:
        """Make one step with each batch."""
        for batch in batches:
            self._state, _ = self._trainer.step(self._state, batch)
        jax.block_until_ready(self._state.variables)

    def run(self, batches: Sequence[Batch]) -> None:
        """Make one step with each batch, in one execution."""
        self._state, _ = self._trainer.run(self._state, batches, len(batches))
        jax.block_until_ready(self._state.variables)


class ByHand:
    """A training as a user of JAX writes it: a jitted scan over the steps."""

    def __init__(self, model: str, batches: Sequence[Batch]) -> None:
        loss, optimizer = loss_of(model), optax.adam(training_task.LEARNING_RATE)
        self._batches = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
        self._variables = jax.tree.map(jnp.asarray, first_variables(model))
        self._optimizer_state = optimizer.init(self._variables)

        def step(carried: Any, batch: Batch) -> tuple[Any, jax.Array]:
            variables, optimizer_state = carried
            value, gradients = jax.value_and_grad(loss)(variables, batch)
            changes, optimizer_state = optimizer.update(gradients, optimizer_state, variables)
            return (optax.apply_updates(variables, changes), optimizer_state), value

        self._loop = jax.jit(lambda *carried: jax.lax.scan(step, carried, self._batches), donate_argnums=(0, 1))

    def run(self) -> None:
        """Make all steps."""
        (self._variables, self._optimizer_state), _ = self._loop(self._variables, self._optimizer_state)
        jax.block_until_ready(self._variables)


def placed_batches(strategy: strategies.Strategy, batch_size: int, count: int) -> list[Batch]:
    """Return `count` batches on the device."""
    batches = itertools.cycle(training_task.batches_of(0, batch_size, 1))
    return [strategy.replicas.devices.place(batch) for batch in itertools.islice(batches, count)]


def take_turns(ways: dict[str, Way], rounds: int) -> dict[str, float]:
    """Return the median seconds of each way, after one round that compiles."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            if number:
                seconds[name].append(time.perf_counter() - began)
    return medians(seconds)


MEASURES = {"accumulation": accumulation, "executions": executions}

if __name__ == "__main__":
    main()
