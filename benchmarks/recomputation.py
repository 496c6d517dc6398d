"""The gain and cost of recomputation: gradients of a deep MLP with `recompute` "none", "blocks" and policies.

Usage:

    python benchmarks/recomputation.py [--layers 32] [--width 512] [--batch-size 2048] [--every 4] [--rounds 5]
                                       [--json PATH]

Columns: "temp MB" is XLA's plan for intermediate values of the gradient program (its memory analysis), "peak MB" the
peak of memory in one gradient, in a process of its own, "ms" the median of a gradient, with all ways in turns in one
process; ratios are to "none".
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from resident_memory import peak_bytes as largest_bytes
from resident_memory import reset_peak, resident_bytes
from timing import ROOT, Machine, command_line, environment, medians  # makes the project importable, too

from strategies.jax.programs.recomputation import recomputation_checkpoint, recomputing

WAYS: dict[str, Any] = {
    "none": "none",
    "blocks": "blocks",
    "dots_saveable": jax.checkpoint_policies.dots_saveable,
    "jax.checkpoint": None,  # around each block, by hand
}
SETTINGS = ("layers", "width", "batch_size", "every", "rounds")
WIDTHS = {"way": 16, "temp MB": 10, "ratio": 8, "peak MB": 10, "ms": 9, "time ratio": 13, "same bits": 12}
LIMIT_S = 300.0


def main() -> None:
    options = read_options()
    if options.peak_of:
        print(json.dumps(peak_bytes(options, options.peak_of)))
        return
    print(
        f"{options.layers} layers of {options.width}, batch {options.batch_size}, a mark every {options.every} layers"
    )
    print("".join(f"{title:>{width}}" for title, width in WIDTHS.items()), flush=True)
    machine = Machine()
    rows = measure(options)
    for row in rows:
        print(format_row(row))
    machine.write(options, SETTINGS, rows=rows)


def read_options() -> argparse.Namespace:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--layers", type=int, default=32, metavar="N", help="layers of the MLP (%(default)s)")
    add("--width", type=int, default=512, metavar="N", help="width of a layer (%(default)s)")
    add("--batch-size", type=int, default=2048, metavar="N", help="rows of the batch (%(default)s)")
    add("--every", type=int, default=4, metavar="N", help="layers between marks (%(default)s)")
    add("--rounds", type=int, default=5, metavar="N", help="turns of each way (%(default)s)")
    add("--peak-of", choices=WAYS, help=argparse.SUPPRESS)
    return parser.parse_args()


def make_task(options: argparse.Namespace, way: str) -> tuple[Callable[..., Any], Any, jax.Array]:
    """Return a loss function, its variables and its batch."""

    def block(layers: Any, hidden: jax.Array) -> jax.Array:
        for layer in layers:
            hidden = jax.nn.gelu(hidden @ layer["kernel"] + layer["bias"])
        return hidden

    def loss_fn(variables: Any, batch: jax.Array) -> jax.Array:
        of_block = jax.checkpoint(block) if way == "jax.checkpoint" else block
        hidden = batch
        for first in range(0, options.layers, options.every):
            hidden = recomputation_checkpoint(of_block(variables[first : first + options.every], hidden))
        return jnp.mean(hidden**2)

    width = options.width
    keys = jax.random.split(jax.random.key(0), options.layers + 1)
    variables = [
        {"kernel": jax.random.normal(key, (width, width)) * (2 / width) ** 0.5, "bias": jnp.zeros(width)}
        for key in keys[1:]
    ]
    batch = jax.random.normal(keys[0], (options.batch_size, width))
    return recomputing(loss_fn, WAYS[way] or "none"), variables, batch


def compiled(options: argparse.Namespace, way: str) -> tuple[Any, tuple[Any, jax.Array]]:
    loss_fn, variables, batch = make_task(options, way)
    return jax.jit(jax.value_and_grad(loss_fn)).lower(variables, batch).compile(), (variables, batch)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    programs = {way: compiled(options, way) for way in WAYS}
    bits = {
        way: [leaf.tobytes() for leaf in map(jax.device_get, jax.tree.leaves(program(*arguments)))]
        for way, (program, arguments) in programs.items()
    }
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way, (program, arguments) in programs.items():
            began = time.perf_counter()
            jax.block_until_ready(program(*arguments))
            times[way].append(1e3 * (time.perf_counter() - began))
    ms = medians(times)
    temp = {way: program.memory_analysis().temp_size_in_bytes for way, (program, _) in programs.items()}
    return [
        {
            "way": way,
            "temp_bytes": temp[way],
            "temp_over_none": temp[way] / temp["none"],
            "peak_bytes": peak_in_new_process(way),
            "ms": ms[way],
            "time_over_none": ms[way] / ms["none"],
            "rounds_ms": times[way],
            "same_bits": bits[way] == bits["none"],
        }
        for way in WAYS
    ]


def peak_in_new_process(way: str) -> int:
    command = [sys.executable, __file__, *sys.argv[1:], "--peak-of", way]
    ended = subprocess.run(
        command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    return int(json.loads(ended.stdout))


def peak_bytes(options: argparse.Namespace, way: str) -> int:
    """Return the peak of memory in the first gradient, in bytes."""
    program, arguments = compiled(options, way)
    jax.block_until_ready(arguments)
    before = resident_bytes()
    reset_peak()
    jax.block_until_ready(program(*arguments))
    return largest_bytes() - before


def format_row(row: dict[str, Any]) -> str:
    figures = (
        row["way"],
        f"{row['temp_bytes'] / 1e6:.1f}",
        f"{row['temp_over_none']:.2f}",
        f"{row['peak_bytes'] / 1e6:.1f}",
        f"{row['ms']:.1f}",
        f"{row['time_over_none']:.2f}",
        "yes" if row["same_bits"] else "no",
    )
    return "".join(f"{figure:>{width}}" for figure, width in zip(figures, WIDTHS.values(), strict=True))


if __name__ == "__main__":
    main()
