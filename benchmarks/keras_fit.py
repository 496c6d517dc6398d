"""How long a step of Keras's `fit` takes on replicas: against stock Keras, our `Trainer`, and Keras's DataParallel.

The MLP 784-1024-1024-10 with Adam, batch 64 for each replica, one core for each instance. Usage:

    python benchmarks/keras_fit.py [--rounds 7] [--steps 40] [--json PATH]

"one": one instance and one replica. An epoch of `fit` in the scope of a strategy, one of stock Keras with the same
model, and the same steps of `Trainer` with the same network in JAX alternate in one process; a step in milliseconds.

"two": two instances with one replica each, under poprun. An epoch of `fit` on both alternates with one of stock Keras
on instance 0, which the other one waits for in a barrier, and with two of stock Keras on both: "apart", where they tell
each other nothing (what two processes of this machine can reach at all), and "lockstep", where they meet in a barrier
after every step (what a step that both make together takes at least, though nothing is exchanged); rows per second. By
CPU time: what instance 0 takes.

"parallel": Keras's own `keras.distribution.DataParallel` over two devices of one process with two cores; a process of
its own, so that it is not paired with the others. null where that fails: its two devices may wait for each other until
XLA ends the process. TensorFlow's MultiWorkerMirroredStrategy is measured where it is
installed, in `benchmarks/train_step.py --against tensorflow`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from statistics import median
from typing import Any

from timing import (
    OtherLoad,
    describe_machine,
    environment,
    medians,
    one_core_each,
    output_lines,
    pinned_command,
    write_figures,
)

BATCH_SIZE = 64
CPU = "_cpu"
NOT_COUNTED = 3  # a step of one replica is compiled anew after 32 of them
LIMIT_S = 600.0


def build(keras: Any) -> Any:
    """The model, compiled."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((784,)), *(layers.Dense(1024, activation="relu") for _ in range(2)), layers.Dense(10)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
    return model


def data(rows: int) -> tuple[Any, Any]:
    """Images and labels."""
    import numpy as np

    rng = np.random.default_rng(0)
    return rng.standard_normal((rows, 784)).astype(np.float32), rng.integers(0, 10, rows).astype(np.int32)


def timed(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each way in each round, one after another, and of CPU time, but for the first rounds."""
    times: dict[str, list[float]] = {name + kind: [] for name in ways for kind in ("", CPU)}
    for _ in range(rounds + NOT_COUNTED):
        for name, way in ways.items():
            start, start_cpu = time.perf_counter(), time.process_time()
            way()
            times[name].append(time.perf_counter() - start)
            times[name + CPU].append(time.process_time() - start_cpu)
    return {name: each[NOT_COUNTED:] for name, each in times.items()}


def ratio(times: dict[str, list[float]], one: str, other: str) -> float:
    """The median of the ratios in one round."""
    return median(a / b for a, b in zip(times[one], times[other], strict=True))


def measure_one(rounds: int, steps: int) -> dict[str, list[float]]:
    """See above; seconds of an epoch."""
    import jax
    import keras
    import numpy as np
    import optax

    import strategies

    strategy = strategies.IPUStrategy(num_replicas=1)
    x, y = data(BATCH_SIZE * steps)
    stock = build(keras)
    with strategy.scope():
        ours = build(keras)

    def loss_fn(variables: Any, batch: Any, key: Any) -> Any:
        images, labels = batch
        for kernel, bias in zip(variables[:4:2], variables[1:4:2], strict=True):
            images = jax.nn.relu(images @ kernel + bias)
        logits = images @ variables[4] + variables[5]
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, {"accuracy": (logits.argmax(1) == labels).mean()}

    trainer = strategies.Trainer(strategy, loss_fn, optax.adam(1e-3))
    state = trainer.init([np.array(variable.value) for variable in stock.trainable_variables])
    dataset = strategy.distribute_dataset((x, y), BATCH_SIZE)

    def fit() -> None:
        with strategy.scope():
            ours.fit(x, y, batch_size=BATCH_SIZE, verbose=0)

    def train() -> None:
        nonlocal state
        for batch in dataset.epoch(0):
            state, metrics = trainer.step(state, batch)
            metrics["loss"]

    ways = {"fit": fit, "stock": lambda: stock.fit(x, y, batch_size=BATCH_SIZE, verbose=0), "trainer": train}
    return timed(ways, rounds)


def measure_two(rounds: int, steps: int) -> dict[str, list[float]]:
    """See above; seconds of an epoch of each, as instance 0 sees them, and nothing on the other one."""
    import keras

    import popdist
    import strategies

    popdist.init()
    strategy = strategies.PopDistStrategy()
    x, y = data(2 * BATCH_SIZE * steps)
    stock = build(keras)
    with strategy.scope():
        ours = build(keras)

    def fit() -> None:
        with strategy.scope():
            ours.fit(x, y, batch_size=BATCH_SIZE, verbose=0)
        strategy.communicator.barrier(name="end of an epoch")

    half = BATCH_SIZE * steps

    def train_stock(is_training: bool, *callbacks: Any) -> None:
        if is_training:
            stock.fit(x[:half], y[:half], batch_size=BATCH_SIZE, verbose=0, callbacks=callbacks)
        strategy.communicator.barrier(name="end of stock Keras")

    def meet(batch: int, logs: Any) -> None:
        float(logs["loss"])  # the step is done
        strategy.communicator.barrier(name="end of a step")

    ways = {
        "fit": fit,
        "stock": lambda: train_stock(strategy.is_chief),
        "apart": lambda: train_stock(True),
        "lockstep": lambda: train_stock(True, keras.callbacks.LambdaCallback(on_train_batch_end=meet)),
    }
    times = timed(ways, rounds)
    return times if strategy.is_chief else {}


def measure_parallel(rounds: int, steps: int) -> dict[str, list[float]]:
    """See above; seconds of an epoch."""
    import jax

    jax.config.update("jax_num_cpu_devices", 2)
    import keras

    keras.distribution.set_distribution(keras.distribution.DataParallel())
    x, y = data(2 * BATCH_SIZE * steps)
    model = build(keras)
    return timed({"parallel": lambda: model.fit(x, y, batch_size=2 * BATCH_SIZE, verbose=0)}, rounds)


MEASURE = {"one": measure_one, "two": measure_two, "parallel": measure_parallel}


def told_by(command: Sequence[str]) -> dict[str, list[float]]:
    """What the processes of a command have measured, of which one says so; it is let end."""
    told = [line[line.index("{") :] for line in output_lines(command, LIMIT_S) if '{"' in line]
    if told:
        return dict(json.loads(told[0]))
    raise SystemExit(f"{' '.join(command)} has told nothing")


def told_if_it_runs(command: Sequence[str]) -> dict[str, list[float]]:
    """The same; nothing where the command fails, which standard error says."""
    try:
        return told_by(command)
    except SystemExit as error:
        print(error, file=sys.stderr)
        return {}


def main() -> None:
    """Measure all ways, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=40, help="of an epoch")
    parser.add_argument("--json", metavar="PATH")
    parser.add_argument("--measure", choices=MEASURE, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measured = MEASURE[arguments.measure](arguments.rounds, arguments.steps)
        if measured:
            print(json.dumps(measured), flush=True)
        return
    if find_spec("keras") is None:
        raise SystemExit("Keras is not installed; run: pip install 'popdist-everywhere[keras]'")
    machine, load = describe_machine(), OtherLoad()
    os.environ.update(environment(KERAS_BACKEND="jax"))
    program = [__file__, f"--rounds={arguments.rounds}", f"--steps={arguments.steps}"]
    measure = [*program, "--measure"]
    parallel = told_if_it_runs([sys.executable, *measure, "parallel"])
    cpus = one_core_each(2)
    one = told_by(pinned_command(cpus[0], [sys.executable, *measure, "one"]))
    poprun = [sys.executable, "-m", "poprun", "--num-instances=2", "--num-replicas=2", "--allow-run-as-root=yes"]
    two = told_by([*poprun, sys.executable, *measure, "two"])
    rows = BATCH_SIZE * arguments.steps
    figures = {
        "one_ms": {name: each * 1e3 / arguments.steps for name, each in medians(one).items()},
        "one_fit_by_stock": ratio(one, "fit", "stock"),
        "one_fit_by_trainer": ratio(one, "fit", "trainer"),
        "one_fit_by_stock_cpu": ratio(one, "fit_cpu", "stock_cpu"),
        "one_fit_by_trainer_cpu": ratio(one, "fit_cpu", "trainer_cpu"),
        "two_rows_per_s": {"fit": 2 * rows / median(two["fit"]), "stock": rows / median(two["stock"])},
        "two_fit_by_stock": 2 * ratio(two, "stock", "fit"),
        "two_fit_by_stock_cpu": 2 * ratio(two, "stock_cpu", "fit_cpu"),
        "two_apart_by_stock": 2 * ratio(two, "stock", "apart"),
        "two_apart_by_stock_cpu": 2 * ratio(two, "stock_cpu", "apart_cpu"),
        "two_lockstep_by_stock": 2 * ratio(two, "stock", "lockstep"),
        "two_fit_by_lockstep": ratio(two, "lockstep", "fit"),
        "parallel_rows_per_s": 2 * rows / median(parallel["parallel"]) if parallel else None,
    }
    print(json.dumps(figures, indent=2))
    write_figures(arguments, ("rounds", "steps"), machine, load, **figures)
    load.warn()


if __name__ == "__main__":
    main()
