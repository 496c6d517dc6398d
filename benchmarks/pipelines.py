"""What pipelines cost and save: an update of four equal stages by each schedule, against the stages one after another.

Usage:

    python benchmarks/pipelines.py [--layers 24] [--width 256] [--batch-size 64] [--micro-batches 24] [--rounds 5]
                                   [--json PATH]

The stages are on two devices in turn, [0, 1, 0, 1] (those of the Interleaved schedule on four). "ms" is the median of
an update, all ways measured in turns in one process; the ratios are those to Sequential. "peak MiB" is the memory that
an update takes at most, in a process of its own, where each stage has a device. "kept" is how many micro-batches the
stages keep. The last line is what the drivers take for a stage program that computes next to nothing.
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
from timing import ROOT, OtherLoad, describe_machine, environment, medians, write_figures  # finds the project, too

STAGES = 4
SETTINGS = ("layers", "width", "batch_size", "micro_batches", "rounds")
WIDTHS = {"way": 36, "ms": 9, "speed": 8, "peak MiB": 10, "kept": 16, "same bits": 11}
LIMIT_S = 300.0
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
    print("".join(f"{title:>{width}}" for title, width in WIDTHS.items()), flush=True)
    load = OtherLoad()
    rows = measure(options)
    for row in rows:
        print(format_row(row))
    overhead_us = 1e6 * overhead_s(options.rounds)
    print(f"drivers take {overhead_us:.0f} us for a stage program")
    load.warn()
    write_figures(options, SETTINGS, describe_machine(), load, rows=rows, overhead_us=overhead_us)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--layers", type=int, default=24, metavar="N", help="of each stage (%(default)s)")
    add("--width", type=int, default=256, metavar="N", help="(%(default)s)")
    add("--batch-size", type=int, default=64, metavar="N", help="rows of a micro-batch (%(default)s)")
    add("--micro-batches", type=int, default=24, metavar="N", help="of an update (%(default)s)")
    add("--rounds", type=int, default=5, metavar="N", help="turns of each way (%(default)s)")
    add("--json", metavar="PATH", help="write the figures to this file")
    add("--peak-of", choices=WAYS, help=argparse.SUPPRESS)
    return parser.parse_args()


class Update:
    """An update in one way, and when the devices did what."""

    def __init__(self, way: str, mapping: Sequence[int], layers: int, width: int, rows: int, count: int) -> None:
        import jax
        import jax.numpy as jnp
        import optax

        import strategies

        def loss_fn(variables: Any, batch: Any, key: Any) -> Any:
            hidden = batch
            for stage in range(STAGES):
                with strategies.pipeline_stage(stage):
                    hidden, _ = jax.lax.scan(
                        lambda x, kernel: (jnp.tanh(x @ kernel), None), hidden, variables[f"stage{stage}"]
                    )
            return jnp.mean(hidden**2)

        schedule, recompute = WAYS[way]
        self.pipeline = strategies.Pipelining(list(mapping), schedule, recompute, watch=self._note)
        strategy = strategies.IPUStrategy(1, ipus_per_replica=STAGES)
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
        self.kept = [self.pipeline.timetable(STAGES, count).stash(stage) for stage in range(STAGES)]

    def _note(self, spans: Any) -> None:
        self.spans = spans[0]

    def make(self) -> float:
        """Seconds until the new variables are there."""
        import jax

        began = time.perf_counter()
        self._state, _ = self._trainer.step(self._state, self._batch)
        jax.block_until_ready(self._state.variables)
        return time.perf_counter() - began

    @property
    def fingerprint(self) -> str:
        """Of the variables."""
        import strategies

        return strategies.fingerprint(self._state.variables)


def update_of(options: argparse.Namespace, way: str, mapping: Sequence[int] | None = None) -> Update:
    if mapping is None:
        mapping = range(STAGES) if way == "interleaved" else [stage % 2 for stage in range(STAGES)]
    return Update(way, mapping, options.layers, options.width, options.batch_size, options.micro_batches)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    updates = {way: update_of(options, way) for way in WAYS}
    for update in updates.values():
        update.make()  # compiles
    bits = {way: update.fingerprint for way, update in updates.items()}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way, update in updates.items():
            times[way].append(1e3 * update.make())
    ms = medians(times)
    return [
        {
            "way": way,
            "ms": ms[way],
            "speed": ms["sequential"] / ms[way],
            "peak_bytes": peak_in_new_process(way),
            "kept": update.kept,
            "rounds_ms": times[way],
            "same_bits": bits[way] == bits["sequential"],
        }
        for way, update in updates.items()
    ]


def peak_in_new_process(way: str) -> int:
    command = [sys.executable, __file__, *sys.argv[1:], "--peak-of", way]
    ended = subprocess.run(
        command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    return int(json.loads(ended.stdout))


def peak_of(options: argparse.Namespace, way: str) -> int:
    """How much memory an update takes at most, each stage on a device of its own; the second one."""
    update = update_of(options, way, range(STAGES))
    update.make()
    before = resident_bytes()
    reset_peak()
    update.make()
    return peak_bytes() - before


def overhead_s(rounds: int) -> float:
    """What the drivers and JAX take for a stage program of a few microseconds, on one device."""
    update = Update("sequential", [0] * STAGES, layers=1, width=1, rows=1, count=64)
    found = []
    for _ in range(rounds + 1):
        update.make()
        spans = [span for span in update.spans if span.action.micro_batch is not None]
        programs = sum(2 if "backward" in span.action.kind.value and span.action.stage else 1 for span in spans)
        found.append((spans[-1].end_s - spans[0].begin_s) / programs)
    return sorted(found[1:])[rounds // 2]


def format_row(row: dict[str, Any]) -> str:
    figures = (
        row["way"],
        f"{row['ms']:.1f}",
        f"{row['speed']:.2f}",
        f"{row['peak_bytes'] / MIB:.1f}",
        ", ".join(map(str, row["kept"])),
        "yes" if row["same_bits"] else "no",
    )
    return "".join(f"{figure:>{width}}" for figure, width in zip(figures, WIDTHS.values(), strict=True))


if __name__ == "__main__":
    main()
