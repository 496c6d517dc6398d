"""Steps of Keras's `fit` on replicas, against stock Keras and our `Trainer`.

The model is the MLP 784-1024-1024-10 with Adam, batch 64 per replica, and one core per instance. Usage:

    python benchmarks/keras_fit.py [--rounds 7] [--steps 40] [--tensorflow-python PATH] [--json PATH]

"one": one instance with one replica. Three epochs alternate in one process: `fit` in the scope of a strategy, stock
Keras with the same model, and `Trainer` with the same network in JAX. In milliseconds per step.

"two": two instances with one replica each, under poprun. An epoch of `fit` on both alternates with an epoch of stock
Keras on instance 0, while the other waits in a barrier, and with two epochs of stock Keras on both. "apart": they
exchange nothing, so this is the limit of two processes on this machine. "lockstep": they meet in a barrier after every
step, so this is the limit of a common step without an exchange. Figures are rows per second; CPU times are
those of instance 0.

"multi_worker": `fit` of Keras on TensorFlow under its MultiWorkerMirroredStrategy, with a worker on each core and the
Python of --tensorflow-python (pip install tensorflow-cpu keras tf_keras). It has its own processes and is not paired.
It runs with Keras 2 (tf_keras). With Keras 3 the figure is null, and the reason is on standard error: with 3.15.1 on
TensorFlow 2.21, `fit` ended on both workers with "ValueError: Attempt to convert a value (PerReplica...) with an
unsupported type".
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from cluster import free_addresses, tf_config
from keras_task import BATCH_SIZE, build, data, timed
from timing import (
    Machine,
    command_line,
    environment,
    medians,
    one_core_each,
    output_lines,
    pinned_command,
)

LIMIT_S = 600.0
MULTI_WORKER = str(Path(__file__).with_name("keras_task.py"))


def ratio(times: dict[str, list[float]], one: str, other: str) -> float:
    """Return the median over rounds of the ratio of two times."""
    return median(a / b for a, b in zip(times[one], times[other], strict=True))


def measure_one(rounds: int, steps: int) -> dict[str, list[float]]:
    """Return the seconds of epochs for the figures of "one"."""
    import jax
    import keras
    import numpy as np
    import optax

    import strategies

    strategy = strategies.LocalStrategy(num_replicas=1)
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
    """Return the seconds of epochs for the figures of "two" on instance 0, and {} on instance 1."""
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
        float(logs["loss"])  # waits for the end of the step
        strategy.communicator.barrier(name="end of a step")

    ways = {
        "fit": fit,
        "stock": lambda: train_stock(strategy.is_chief),
        "apart": lambda: train_stock(True),
        "lockstep": lambda: train_stock(True, keras.callbacks.LambdaCallback(on_train_batch_end=meet)),
    }
    times = timed(ways, rounds)
    return times if strategy.is_chief else {}


MEASURE = {"one": measure_one, "two": measure_two}


def told_by(command: Sequence[str]) -> dict[str, list[float]]:
    """Run a command to its end, and return the times that one of its processes has printed."""
    told = [line[line.index("{") :] for line in output_lines(command, LIMIT_S) if '{"' in line]
    if told:
        return dict(json.loads(told[0]))
    raise SystemExit(f"{' '.join(command)} has printed no times; its output is above")


def told_if_it_runs(command: Sequence[str]) -> dict[str, list[float]]:
    """Return the times of a command, or {} if it fails, with the reason on standard error."""
    try:
        return told_by(command)
    except SystemExit as error:
        print(error, file=sys.stderr)
        return {}


def told_by_workers(python: str, cpus: Sequence[str], words: Sequence[str], version: int) -> dict[str, list[float]]:
    """Run one of TensorFlow's workers on each core, and return the times of the first; {} if it fails.

    Args:
        python: Python that has TensorFlow.
        cpus: Core of each worker.
        words: Arguments of the workers.
        version: Version of Keras, 2 or 3.
    """
    told = ["TF_CPP_MIN_LOG_LEVEL=2", "KERAS_BACKEND=tensorflow", f"TF_USE_LEGACY_KERAS={int(version == 2)}"]
    addresses = free_addresses(len(cpus))
    first, *others = (
        pinned_command(cpu, ["env", *told, f"TF_CONFIG={tf_config(addresses, rank)}", python, MULTI_WORKER, *words])
        for rank, cpu in enumerate(cpus)
    )
    started = [subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL) for command in others]
    try:
        return told_if_it_runs(first)
    finally:
        for process in started:
            process.kill()
            process.wait()


def main() -> None:
    """Measure all ways, and print the figures."""
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each way (%(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="steps of an epoch (%(default)s)")
    parser.add_argument("--tensorflow-python", metavar="PATH", help="Python with TensorFlow, and tf_keras for Keras 2")
    parser.add_argument("--measure", choices=MEASURE, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measured = MEASURE[arguments.measure](arguments.rounds, arguments.steps)
        if measured:
            print(json.dumps(measured), flush=True)
        return
    if find_spec("keras") is None:
        raise SystemExit("Keras is not installed; run: pip install -e '.[keras]'")
    machine = Machine()
    os.environ.update(environment(KERAS_BACKEND="jax"))
    program = [__file__, f"--rounds={arguments.rounds}", f"--steps={arguments.steps}"]
    measure = [*program, "--measure"]
    cpus = one_core_each(2)
    one = told_by(pinned_command(cpus[0], [sys.executable, *measure, "one"]))
    poprun = [sys.executable, "-m", "poprun", "--num-instances=2", "--num-replicas=2", "--allow-run-as-root=yes"]
    two = told_by([*poprun, sys.executable, *measure, "two"])
    words = [str(arguments.rounds), str(arguments.steps)]
    python = arguments.tensorflow_python
    workers = {version: told_by_workers(python, cpus, words, version) if python else {} for version in (2, 3)}
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
        "multi_worker_rows_per_s": {
            f"keras {version}": 2 * rows / median(told["multi_worker"]) if told else None
            for version, told in workers.items()
        },
    }
    print(json.dumps(figures, indent=2))
    machine.write(arguments, ("rounds", "steps"), **figures)


if __name__ == "__main__":
    main()
