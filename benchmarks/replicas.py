"""What it costs that replicas run one executable, compiled for a single device, in a thread each.

Compared with `jax.shard_map` over as many simulated devices, which compiles one program for all of them (and gives
other bits, see docs/bits.md). Both compute the gradients of the same replicas of one instance, in turns. Usage:

    python benchmarks/replicas.py [--models mlp cnn transformer] [--replicas 1 2 4 8] [--json PATH]

Columns, medians: ms for the gradients of all replicas in both ways, and their ratio; seconds from the first call to
its result, which compiles, and for "threads" its ratio to that of one replica; the largest resident memory of a process
that does only this, in MiB beyond what it had before the first call.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import training_task
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from timing import OtherLoad, as_strategies_do, describe_machine, environment, medians, write_figures
from training_jax import first_variables, loss_of

from strategies.replicas.devices import choose_grid

WAYS = ("shard_map", "threads")
MODELS = (*training_task.MODELS, "transformer")
ALL_REPLICAS = 8  # of the job; the size of XLA's thread pool follows from it
SETTINGS = ("models", "replicas", "batch_size", "rounds")
MIB = 1 << 20
HEADING = (
    f"{'model':<12}{'replicas':>9}{'shard_map':>11}{'threads':>9}{'ratio':>7}{'first s':>9}{'':>7}{'of one':>8}"
    f"{'memory':>9}{'':>7}"
)


def main() -> None:
    options = read_options()
    if options.measure:
        print(json.dumps(measure(options)))
        return
    machine = describe_machine()
    load = OtherLoad()
    rows: list[dict[str, Any]] = []
    print(f"batch {options.batch_size} per replica, gradients only; ms, s and MiB, medians of {options.rounds}")
    print(HEADING)
    for model in options.models:
        for replicas in options.replicas:
            rows.append(row_of(model, replicas, options, rows))
            print(formatted(rows[-1]), flush=True)
    load.warn()
    write_figures(options, SETTINGS, machine, load, rows=rows)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_cases(parser)
    parser.add_argument("--measure", nargs="+", choices=WAYS, help=argparse.SUPPRESS)
    return parser.parse_args()


def add_cases(parser: argparse.ArgumentParser) -> None:
    """The options that say what is measured, how often, and where it is written."""
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL", help="(%(default)s)")
    add("--replicas", nargs="+", type=int, default=[1, 2, 4, 8], metavar="N", help="of one instance (%(default)s)")
    add("--batch-size", type=int, default=64, metavar="N", help="per replica (%(default)s)")
    add("--rounds", type=int, default=40, metavar="N", help="turns of each way (%(default)s)")
    add("--json", metavar="PATH", help="write the figures to this file")


def row_of_one(rows: Sequence[dict[str, Any]], model: str) -> dict[str, Any] | None:
    """The row of the same model with one replica, where there is one already."""
    return next((row for row in rows if row["model"] == model and row["replicas"] == 1), None)


def row_of(model: str, replicas: int, options: argparse.Namespace, before: Sequence[dict[str, Any]]) -> dict[str, Any]:
    together = in_new_process(model, replicas, options, *WAYS)
    alone = {way: in_new_process(model, replicas, options, way) for way in WAYS}
    first_s = {way: found["first_s"][way] for way, found in alone.items()}
    of_one = row_of_one(before, model)
    pairs = zip(together["rounds_ms"]["threads"], together["rounds_ms"]["shard_map"], strict=True)
    return {
        "model": model,
        "replicas": replicas,
        "ms": medians(together["rounds_ms"]),
        "rounds_ms": together["rounds_ms"],
        "threads_over_shard_map": median(ours / theirs for ours, theirs in pairs),
        "first_s": first_s,
        "first_over_one_replica": first_s["threads"] / of_one["first_s"]["threads"] if of_one else None,
        "memory_bytes": {way: found["memory_bytes"] for way, found in alone.items()},
    }


def formatted(row: dict[str, Any]) -> str:
    of_one = row["first_over_one_replica"]
    memory = {way: f"+{nbytes / MIB:.0f}" for way, nbytes in row["memory_bytes"].items()}
    return (
        f"{row['model']:<12}{row['replicas']:9}{row['ms']['shard_map']:11.2f}{row['ms']['threads']:9.2f}"
        f"{row['threads_over_shard_map']:7.3f}{row['first_s']['shard_map']:9.2f}{row['first_s']['threads']:7.2f}"
        f"{'-' if of_one is None else format(of_one, '.2f'):>8}{memory['shard_map']:>9}{memory['threads']:>7}"
    )


def in_new_process(model: str, replicas: int, options: argparse.Namespace, *ways: str) -> dict[str, Any]:
    words = ["--models", model, "--replicas", str(replicas), "--batch-size", str(options.batch_size)]
    words += ["--rounds", str(options.rounds), "--measure", *ways]
    environ = as_strategies_do(environment(), ALL_REPLICAS)
    ended = subprocess.run([sys.executable, __file__, *words], env=environ, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(ended.stderr)
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


# ---- in the new process


def measure(options: argparse.Namespace) -> dict[str, Any]:
    [model], [replicas] = options.models, options.replicas
    jax.config.update("jax_num_cpu_devices", replicas)  # of which threads use one
    task = TASKS[model](options.batch_size * replicas)
    programs = {way: MAKERS[way](replicas, *task) for way in options.measure}
    before = peak_bytes()
    first_s = {way: seconds(program) for way, program in programs.items()}
    rounds_ms: dict[str, list[float]] = {way: [] for way in programs}
    for _ in range(options.rounds):
        for way, program in programs.items():
            rounds_ms[way].append(1e3 * seconds(program))
    return {"first_s": first_s, "rounds_ms": rounds_ms, "memory_bytes": peak_bytes() - before}


def seconds(program: Callable[[], Any]) -> float:
    began = time.perf_counter()
    program()
    return time.perf_counter() - began


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


Loss = Callable[[Any, Any], jax.Array]


def over_devices(replicas: int, loss_fn: Loss, variables: Any, batch: Any) -> Callable[[], Any]:
    """One program for all replicas, each on a device of its own."""
    mesh = Mesh(np.array(jax.devices()), ("replica",))
    split, whole = PartitionSpec("replica"), PartitionSpec()
    spread = jax.shard_map(gradients_of(loss_fn), mesh=mesh, in_specs=(whole, split), out_specs=split, check_vma=False)
    program = jax.jit(spread)
    variables = jax.device_put(variables, NamedSharding(mesh, whole))
    batch = jax.device_put(batch, NamedSharding(mesh, split))
    return lambda: jax.block_until_ready(program(variables, batch))


def in_threads(replicas: int, loss_fn: Loss, variables: Any, batch: Any) -> Callable[[], Any]:
    """As strategies do it."""
    devices = choose_grid(range(replicas)).first
    program = devices.compile(gradients_of(loss_fn))
    variables, batch = jax.device_put(variables, devices.devices[0]), devices.place(batch)

    def compute() -> Any:
        parts = devices.parts(batch)
        executable = program.compiled(devices.devices[0], variables, parts[0])
        return devices.each(lambda position: jax.block_until_ready(executable(variables, parts[position])))

    return compute


def gradients_of(loss_fn: Loss) -> Callable[[Any, Any], list[jax.Array]]:
    def gradients(variables: Any, batch: Any) -> list[jax.Array]:
        return [leaf.reshape(-1) for leaf in jax.tree.leaves(jax.grad(loss_fn)(variables, batch))]

    return gradients


MAKERS = {"shard_map": over_devices, "threads": in_threads}


def of_images(model: str) -> Callable[[int], tuple[Loss, Any, Any]]:
    return lambda rows: (loss_of(model), first_variables(model), training_task.batches_of(0, rows, 1)[0])


def transformer(
    rows: int, *, layers: int = 3, width: int = 128, heads: int = 4, length: int = 32
) -> tuple[Loss, Any, Any]:
    """Blocks of attention and a wide hidden layer, each behind a normalisation; it predicts the next of 64 tokens."""
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
