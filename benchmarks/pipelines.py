"""The cost and gain of pipelines: an update of four equal stages by each schedule, against the stages in sequence.

Usage:

    python benchmarks/pipelines.py [--layers 400] [--width 64] [--batch-size 128] [--micro-batches 16] [--rounds 3]
                                   [--kept-mib 10] [--products] [--json PATH]

The stages are on two devices in turn, [0, 1, 0, 1]; those of the Interleaved schedule are on four devices. Their layers
multiply and add in loops, because XLA runs each loop on one core. XLA divides a matrix product among all cores, even
without a pipeline; --products shows that. "ms" is the median of an update, with all ways in turns in one process. The
ratios are to Sequential. Its programs use "cores" (CPU seconds per second), and the forward pass of a stage takes
"stage ms". "peak MiB" is the peak of memory in an update of 24 micro-batches, in a process of its own, with a device
for each stage, which keeps --kept-mib of a micro-batch; "x" is its ratio to Sequential. "kept" is the number of
micro-batches that each stage keeps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from resident_memory import MIB, peak_bytes, reset_peak, resident_bytes
from timing import ROOT, Machine, command_line, environment, medians  # makes the project importable, too

STAGES = 4
SETTINGS = ("layers", "width", "batch_size", "micro_batches", "rounds", "kept_mib", "products")
WIDTHS = {"way": 36, "ms": 9, "speed": 8, "same bits": 11}
MEMORY_WIDTHS = {"way": 36, "peak MiB": 10, "x": 8, "kept": 14}
LIMIT_S = 300.0
OWN_PAGES = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Settings of the C library that return freed memory at once, so that earlier memory does not hide new memory."""

MEMORY_WAYS = ("sequential", "interleaved", "grouped", "grouped, recomputing")
MEMORY_MICRO_BATCHES = 24
MEMORY_LAYERS, MEMORY_WIDTH = 24, 32
WAYS = {
    "sequential": ("sequential", False),
    "grouped": ("grouped", False),
    "grouped, recomputing": ("grouped", True),
    "interleaved": ("interleaved", False),
    "one_forward_one_backward": ("one_forward_one_backward", False),
    "one_forward_one_backward, recomputing": ("one_forward_one_backward", True),
    "zero_bubble": ("zero_bubble", False),
}


def main() -> None:
    options = read_options()
    if options.peak_of:
        print(json.dumps(peak_of(options, options.peak_of)))
        return
    print(
        f"{STAGES} stages of {options.layers} layers of {options.width}, {options.micro_batches} micro-batches of "
        f"{options.batch_size}"
    )
    machine = Machine()
    rows, sequential = measure(options)
    print_table(WIDTHS, [(r["way"], f"{r['ms']:.1f}", f"{r['speed']:.2f}", said(r["same_bits"])) for r in rows])
    print(f"sequential: {sequential['cores']:.2f} cores, stage ms {sequential['stage_ms']:.1f}", flush=True)
    memory = peaks(options)
    print_table(
        MEMORY_WIDTHS,
        [(r["way"], f"{r['peak_bytes'] / MIB:.1f}", f"{r['times']:.2f}", r["kept"]) for r in memory],
    )
    overhead_us = 1e6 * overhead_s(options.rounds)
    print(f"drivers take {overhead_us:.0f} us for a stage program")
    figures = {"rows": rows, "sequential": sequential, "memory": memory, "overhead_us": overhead_us}
    machine.write(options, SETTINGS, **figures)


def print_table(widths: dict[str, int], rows: Sequence[Sequence[str]]) -> None:
    for row in [tuple(widths), *rows]:
        print("".join(f"{cell:>{width}}" for cell, width in zip(row, widths.values(), strict=True)), flush=True)


def said(holds: bool) -> str:
    return "yes" if holds else "no"


def read_options() -> argparse.Namespace:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--layers", type=int, default=400, metavar="N", help="layers of each stage (%(default)s)")
    add("--width", type=int, default=64, metavar="N", help="width of a layer (%(default)s)")
    add("--batch-size", type=int, default=128, metavar="N", help="rows of a micro-batch (%(default)s)")
    add("--micro-batches", type=int, default=16, metavar="N", help="micro-batches of an update (%(default)s)")
    add("--rounds", type=int, default=3, metavar="N", help="turns of each way (%(default)s)")
    add("--kept-mib", type=int, default=10, metavar="N", help="MiB that a stage keeps of a micro-batch (%(default)s)")
    add("--products", action="store_true", help="use layers of matrix products, which XLA divides among cores")
    add("--peak-of", choices=WAYS, help=argparse.SUPPRESS)
    return parser.parse_args()


class Update:
    """An update in one way, with the timed work of the devices."""

    def __init__(
        self, way: str, mapping: Sequence[int], layers: int, width: int, rows: int, count: int, products: bool = True
    ) -> None:
        import jax
        import jax.numpy as jnp
        import optax

        import strategies

        def layer(hidden: Any, kernel: Any) -> Any:
            product = hidden @ kernel if products else (hidden[:, :, None] * kernel).sum(1)
            return jnp.tanh(product), None

        def loss_fn(variables: Any, batch: Any, key: Any) -> Any:
            hidden = batch
            for stage in range(STAGES):
                with strategies.pipeline_stage(stage):
                    hidden, _ = jax.lax.scan(layer, hidden, variables[f"stage{stage}"])
            return jnp.mean(hidden**2)

        schedule, recompute = WAYS[way]
        self.pipeline = strategies.Pipelining(list(mapping), schedule, recompute, watch=self._note)
        strategy = strategies.LocalStrategy(1, ipus_per_replica=STAGES)
        self._trainer = strategies.Trainer(
            strategy, loss_fn, optax.sgd(1e-3), gradient_accumulation_count=count, pipeline=self.pipeline
        )
        draw = np.random.default_rng(0).standard_normal
        kernels = {
            f"stage{stage}": draw((layers, width, width)).astype(np.float32) / width**0.5 for stage in range(STAGES)
        }
        self._state = self._trainer.init(kernels)
        self._batch = draw((count * rows, width)).astype(np.float32)
        self.spans: Sequence[Any] = ()

    def _note(self, spans: Any) -> None:
        self.spans = spans[0]

    def make(self) -> float:
        """Make an update, and return the seconds until the new variables are ready."""
        import jax

        began = time.perf_counter()
        self._state, _ = self._trainer.step(self._state, self._batch)
        jax.block_until_ready(self._state.variables)
        return time.perf_counter() - began

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the variables."""
        import strategies

        return strategies.fingerprint(self._state.variables)


def update_of(options: argparse.Namespace, way: str, mapping: Sequence[int] | None = None) -> Update:
    if mapping is None:
        mapping = range(STAGES) if way == "interleaved" else [stage % 2 for stage in range(STAGES)]
    sizes = (options.layers, options.width, options.batch_size, options.micro_batches)
    return Update(way, mapping, *sizes, options.products)


def measure(options: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Return a row for each way, and the cores and the time of a stage in Sequential's programs."""
    updates = {way: update_of(options, way) for way in WAYS}
    for update in updates.values():
        update.make()  # compiles
    bits = {way: update.fingerprint for way, update in updates.items()}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    cpu_s = stage_s = 0.0
    for _ in range(options.rounds):
        for way, update in updates.items():
            before_s = time.process_time()
            times[way].append(1e3 * update.make())
            if way == "sequential":
                cpu_s += time.process_time() - before_s
                busy_s = [span.end_s - span.begin_s for span in update.spans if span.action.kind.value == "forward"]
                stage_s += sum(busy_s) / len(busy_s)
    ms = medians(times)
    rows = [
        {
            "way": way,
            "ms": ms[way],
            "speed": ms["sequential"] / ms[way],
            "rounds_ms": times[way],
            "same_bits": bits[way] == bits["sequential"],
        }
        for way in WAYS
    ]
    cores = 1e3 * cpu_s / sum(times["sequential"])
    return rows, {"cores": cores, "stage_ms": 1e3 * stage_s / options.rounds}


# ---- memory


def peaks(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the peaks of memory of an update, for some of the ways."""
    found = {way: peak_in_new_process(way) for way in MEMORY_WAYS}
    kept = {way: kept_by_stages(way) for way in MEMORY_WAYS}
    return [
        {
            "way": way,
            "peak_bytes": peak,
            "times": peak / found["sequential"],
            "kept": ", ".join(map(str, kept[way])),
        }
        for way, peak in found.items()
    ]


def kept_by_stages(way: str) -> list[int]:
    from strategies import pipelining_ops

    schedule, recompute = WAYS[way]
    return [*pipelining_ops.plan(STAGES, MEMORY_MICRO_BATCHES, schedule, recompute=recompute).stash]


def peak_in_new_process(way: str) -> int:
    command = [sys.executable, __file__, *sys.argv[1:], "--peak-of", way]
    ended = subprocess.run(
        command, env=environment(**OWN_PAGES), cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    return int(json.loads(ended.stdout))


def peak_of(options: argparse.Namespace, way: str) -> int:
    """Return the peak of memory of the second update, with each stage on its own device.

    Layers keep their inputs and outputs.
    """
    rows = options.kept_mib * MIB // (2 * MEMORY_LAYERS * MEMORY_WIDTH * np.dtype(np.float32).itemsize)
    update = Update(way, range(STAGES), MEMORY_LAYERS, MEMORY_WIDTH, rows, MEMORY_MICRO_BATCHES)
    update.make()
    before = resident_bytes()
    reset_peak()
    update.make()
    return peak_bytes() - before


# ---- drivers


def overhead_s(rounds: int) -> float:
    """Return the time of the drivers and JAX for a stage program of a few microseconds, on one device."""
    update = Update("sequential", [0] * STAGES, layers=1, width=1, rows=1, count=64)
    found = []
    for _ in range(rounds + 1):
        update.make()
        spans = [span for span in update.spans if span.action.micro_batch is not None]
        programs = sum(2 if "backward" in span.action.kind.value and span.action.stage else 1 for span in spans)
        found.append((spans[-1].end_s - spans[0].begin_s) / programs)
    return sorted(found[1:])[rounds // 2]


if __name__ == "__main__":
    main()
