"""Training steps of this checkout against those of another commit: step times and compile times.

One instance drives all replicas. Each version has its own process, and the two take turns. Usage, in a checkout:

    python benchmarks/against.py COMMIT [--models mlp cnn transformer] [--replicas 1 2 4 8] [--json PATH]

Columns: ms for a step on a batch that the data set has placed, before and now, medians of turns; the median of their
ratios within a turn, and the ratio of the shortest turns; seconds that XLA compiled until the end of the first step,
before and now; the ratio of the latter to its value with one replica.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import control
import jax
import jax.numpy as jnp
import numpy as np
import optax
import training_task
from timing import ROOT, Machine, command_line, environment
from training_jax import first_variables, loss_of

WAYS = ("before", "now")
MODELS = (*training_task.MODELS, "transformer")
COMPILING = "/jax/core/compile/backend_compile_duration"
SETTINGS = ("commit", "models", "replicas", "batch_size", "rounds")
HEADING = (
    f"{'model':<12}{'replicas':>9}{'before':>9}{'now':>9}{'ratio':>7}{'of least':>9}"
    f"{'compile s':>10}{'':>7}{'of one':>8}"
)


def main() -> None:
    options = read_options()
    if options.worker:
        serve(*options.worker, options.batch_size)
        return
    machine = Machine()
    rows: list[dict[str, Any]] = []
    print(f"batch {options.batch_size} per replica, {options.commit} and now; medians of {options.rounds} turns")
    print(HEADING)
    with tempfile.TemporaryDirectory() as folder:
        before = checked_out(options.commit, Path(folder) / "before")
        for model, replicas in itertools.product(options.models, options.replicas):
            rows.append(row_of(model, replicas, before, options, rows))
            print(formatted(rows[-1]), flush=True)
    machine.write(options, SETTINGS, rows=rows)


def read_options() -> argparse.Namespace:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("commit", nargs="?", default="HEAD", help="commit of this repository (HEAD, to measure uncommitted changes)")
    add("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL", help="(%(default)s)")
    add("--replicas", nargs="+", type=int, default=[1, 2, 4, 8], metavar="N", help="numbers of replicas (%(default)s)")
    add("--batch-size", type=int, default=64, metavar="N", help="rows per replica (%(default)s)")
    add("--rounds", type=int, default=40, metavar="N", help="turns of each version (%(default)s)")
    add("--turn-s", type=float, default=0.1, metavar="S", help="approximate length of a turn (%(default)s)")
    add("--limit-s", type=float, default=600.0, metavar="S", help="time limit of a turn (%(default)s)")
    add("--worker", nargs=4, help=argparse.SUPPRESS)
    return parser.parse_args()


def checked_out(commit: str, folder: Path) -> Path:
    """Make a folder with the files of a commit, and return it."""
    folder.mkdir()
    archive = subprocess.run(["git", "-C", ROOT, "archive", commit], stdout=subprocess.PIPE, check=False)
    if archive.returncode:
        raise SystemExit(f"{commit} is not a commit of this repository; the reason is above")
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
    return folder


def row_of(
    model: str, replicas: int, before: Path, options: argparse.Namespace, rows: list[dict[str, Any]]
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, control.Coordinator(folder, options.limit_s) as coordinator:
        versions = {
            way: coordinator.start(
                way, 1, [worker(root, coordinator.path, way, model, replicas, options)], finding(root)
            )
            for way, root in zip(WAYS, (before, ROOT), strict=True)
        }
        first = {way: group.ask(do="train", steps=1)[0] for way, group in versions.items()}
        [warm] = versions["now"].ask(do="train", steps=3)
        steps = max(1, round(3 * options.turn_s / warm["seconds"]))
        rounds_ms: dict[str, list[float]] = {way: [] for way in WAYS}
        for turn in range(options.rounds):
            for way in WAYS if turn % 2 else reversed(WAYS):
                rounds_ms[way].append(1e3 * versions[way].ask(do="train", steps=steps)[0]["seconds"] / steps)
    of_one = next((row for row in rows if row["model"] == model and row["replicas"] == 1), None)
    compile_s = {way: answer["compile_s"] for way, answer in first.items()}
    return {
        "model": model,
        "replicas": replicas,
        "ms": {way: median(values) for way, values in rounds_ms.items()},
        "rounds_ms": rounds_ms,
        "now_over_before": median(now / was for now, was in zip(rounds_ms["now"], rounds_ms["before"], strict=True)),
        "least_over_least": min(rounds_ms["now"]) / min(rounds_ms["before"]),
        "compile_s": compile_s,
        "compile_over_one_replica": compile_s["now"] / of_one["compile_s"]["now"] if of_one else None,
    }


def worker(root: Path, path: str, way: str, model: str, replicas: int, options: argparse.Namespace) -> list[str]:
    """Return the command of a worker with a checkout's own benchmark, because imports may differ between commits."""
    return [
        *(sys.executable, str(root / "benchmarks" / "against.py"), "--batch-size", str(options.batch_size)),
        *("--worker", path, way, model, str(replicas)),
    ]


def finding(root: Path) -> dict[str, str]:
    """Return the environment of processes that import the packages of a checkout."""
    environ = environment()
    return environ | {"PYTHONPATH": f"{root}:{environ['PYTHONPATH']}"}


def formatted(row: dict[str, Any]) -> str:
    of_one = row["compile_over_one_replica"]
    return (
        f"{row['model']:<12}{row['replicas']:9}{row['ms']['before']:9.2f}{row['ms']['now']:9.2f}"
        f"{row['now_over_before']:7.3f}{row['least_over_least']:9.3f}"
        f"{row['compile_s']['before']:10.2f}{row['compile_s']['now']:7.2f}"
        f"{'-' if of_one is None else format(of_one, '.2f'):>8}"
    )


# ---- in the worker


def serve(path: str, way: str, model: str, replicas: str, batch_size: int) -> None:
    training = Training(model, int(replicas), batch_size)
    control.serve(path, way, 0, {"train": training.train})


class Training:
    """Training steps with the version of the Trainer that Python finds first."""

    def __init__(self, model: str, replicas: int, batch_size: int) -> None:
        import strategies

        self.compile_s = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._hear)
        strategy = strategies.LocalStrategy(replicas)
        loss_fn, variables, batch = TASKS[model](batch_size * replicas)
        optimizer = optax.adam(training_task.LEARNING_RATE)
        self._trainer = strategies.Trainer(strategy, lambda variables, batch, key: loss_fn(variables, batch), optimizer)
        self._state = self._trainer.init(variables)
        arrays = batch if isinstance(batch, dict) else {"": batch}
        dataset = strategy.distribute_dataset(arrays, batch_size=batch_size, shuffle=False)
        [placed] = dataset.epoch(0)
        self._batch = placed if isinstance(batch, dict) else placed[""]

    def _hear(self, event: str, seconds: float, **_: Any) -> None:
        if event == COMPILING:
            self.compile_s += seconds

    def train(self, steps: int) -> dict[str, float]:
        """Make some steps; return their seconds, and the seconds that XLA has compiled in total."""
        state = self._state
        began = time.perf_counter()
        for _ in range(steps):
            state, metrics = self._trainer.step(state, self._batch)
        jax.block_until_ready((state.variables, metrics["loss"]))
        seconds = time.perf_counter() - began
        self._state = state
        return {"seconds": seconds, "compile_s": self.compile_s}


# ---- tasks


Loss = Callable[[Any, Any], jax.Array]


def of_images(model: str) -> Callable[[int], tuple[Loss, Any, Any]]:
    return lambda rows: (loss_of(model), first_variables(model), training_task.batches_of(0, rows, 1)[0])


def transformer(
    rows: int, *, layers: int = 3, width: int = 128, heads: int = 4, length: int = 32
) -> tuple[Loss, Any, Any]:
    """Return a small transformer that predicts the next of 64 tokens, with its variables and a batch."""
    random = np.random.default_rng(0)

    def kernel(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)

    blocks = [
        {"qkv": kernel(width, 3 * width), "out": kernel(width, width), "up": kernel(width, 4 * width)}
        | {"down": kernel(4 * width, width)}
        for _ in range(layers)
    ]
    variables = {"tokens": kernel(64, width), "blocks": blocks}
    batch = random.integers(0, 64, (rows, length + 1)).astype(np.int32)
    mask = np.tril(np.ones((length, length), bool))

    def normalised(x: jax.Array) -> jax.Array:
        return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)

    def attention(block: Any, x: jax.Array) -> jax.Array:
        q, k, v = (
            part.reshape(*x.shape[:2], heads, width // heads) for part in jnp.split(x @ block["qkv"], 3, axis=-1)
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(width // heads).astype(np.float32)
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ block["out"]

    def loss_fn(variables: Any, batch: jax.Array) -> jax.Array:
        x = variables["tokens"][batch[:, :-1]]
        for block in variables["blocks"]:
            x = x + attention(block, normalised(x))
            x = x + jax.nn.gelu(normalised(x) @ block["up"]) @ block["down"]
        log = jax.nn.log_softmax(normalised(x) @ variables["tokens"].T)
        return -jnp.take_along_axis(log, batch[:, 1:, None], axis=-1).mean()

    return loss_fn, variables, batch


TASKS: dict[str, Callable[[int], tuple[Loss, Any, Any]]] = {
    **{model: of_images(model) for model in training_task.MODELS},
    "transformer": transformer,
}


if __name__ == "__main__":
    main()
