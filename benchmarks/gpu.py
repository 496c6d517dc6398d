"""A training step on a GPU: ours beside plain JAX and plain PyTorch, with memory, exchange and bits.

Usage:

    python benchmarks/gpu.py [--only jax torch exchange bits] [--steps 20] [--seconds 290] [--out PATH] [--json PATH]

The models are a GPT of 124 million parameters (12 blocks of 768, 512 tokens, batch 8, bfloat16, AdamW) and an MLP
784-1024-1024-10 with batch 256. R replicas share the batch. n instances share the GPU, or have one each if there are
enough. "by hand" is R programs, sums in the tree and an update, written in JAX. "exchange" trains variables of 496 MB
whose gradients cost nothing else. "bits" compares fingerprints for n = 1, 2, 4 on every path.

Each row has its own process (n processes for n instances). The processes of some rows start together and then wait, and
nothing else runs while a row is measured. "queue" is the time of a step in a queue of steps; the program waits for the
device at the end of the queue. "read" is the time of a step whose loss is read. Ratios are to the plain program with
the same flags (deterministic operations). "default" is the ratio of the queue to the plain program with the default
flags. Memory is the peak of the framework's allocator in one process. The exchange is the one that the project has
logged; a question mark means that the exchange was requested and not confirmed. Without a GPU, small models run on the
CPU, in some minutes.

The exit status is 1 if a row has failed, or if fingerprints differ that should not.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gpu_jobs import Effort, GpuJob
from gpu_task import BITS, BY_HAND, COPY, DDP, FRAMEWORKS, GPT, JAX, MLP, OURS, PLAIN, TORCH, GpuCase
from timing import Machine, command_line

PARTS = ("jax", "torch", "exchange", "bits")
HEADING = (
    f"{'':<23}{'R':>3}{'n':>3} {'exchange':<10}{'queue ms':>9}{'ratio':>7}{'default':>8}"
    f"{'read ms':>9}{'ratio':>7}{'peak MB':>9}{'ratio':>7}  bits"
)
SETTINGS = ("only", "rows", "steps", "seconds")
LEAST_S = 15.0  # a case needs at least this much time
ANSWER_S = 40.0  # time limit of a queue of steps, which has at least two

Row = dict[str, Any]


def main() -> int:
    options = read_options()
    machine = Machine()
    gpus = gpu_count()
    cases = [case for case in cases_of(gpus) if case.part in options.only and is_wanted(case, options.rows)]
    rows: list[Row] = []
    for row in measured(cases, options, gpus):
        rows.append(row)
        print(f"{row.get('start_s', 0.0):5.1f} s to start, {formatted(row, rows)}", file=sys.stderr, flush=True)
        if options.out:
            with Path(options.out).open("a") as lines:
                lines.write(json.dumps(row) + "\n")
    print_table(rows, gpus)
    for line in against_by_hand(rows):
        print(line)
    others = other_bits(rows)
    print("\n".join(others) if others else "all fingerprints of a model and R are equal")
    machine.write(options, SETTINGS, gpus=gpus, table=rows)
    return 1 if others or any("error" in row for row in rows) else 0


def read_options() -> argparse.Namespace:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=f"{', '.join(PARTS)} (all)")
    help_of_rows = "rows with all of these words, such as: gpt ours R=4 n=1 host; may be given several times"
    add("--rows", nargs="+", action="append", metavar="WORD", help=help_of_rows)
    add("--steps", type=int, default=20, metavar="N", help="maximum steps of a queue (%(default)s)")
    add("--turn-s", type=float, default=1.0, metavar="S", help="maximum length of a queue (%(default)s)")
    add("--seconds", type=float, default=290.0, metavar="S", help="time for all rows (%(default)s)")
    add("--limit-s", type=float, default=90.0, metavar="S", help="time limit for the start of a row (%(default)s)")
    add("--at-once", type=float, default=6, metavar="N", help="number of GPTs that fit into the GPU (%(default)s)")
    add("--out", metavar="PATH", help="append each row to this file, as a line of JSON")
    return parser.parse_args()


def gpu_count() -> int:
    """Return the number of GPUs that the CUDA driver shows to this process; 0 if programs must use the CPU."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return 0
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    return count.value if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0


# ---- cases


def cases_of(gpus: int) -> list[GpuCase]:
    """Return all rows of the table, in order."""
    paths = exchanges_of(gpus)
    cases = [*steps_of_jax(paths), *steps_of_torch(paths, gpus)]
    for framework in FRAMEWORKS:
        copy = GpuCase("exchange", framework, COPY, OURS)
        cases += [copy, *(replace(copy, replicas=2, instances=2, exchange=path) for path in paths)]
    for framework in FRAMEWORKS:
        bits = GpuCase("bits", framework, BITS, OURS, 4)
        several = itertools.product((2, 4), paths)
        cases += [bits, *(replace(bits, instances=n, exchange=path) for n, path in several if fits(n, path, gpus))]
    return [replace(case, is_small=not gpus) for case in cases]


def exchanges_of(gpus: int) -> tuple[str, ...]:
    """Return the paths of gradients that two instances can use on this machine."""
    if not gpus:
        return ("host", "compiled")
    return ("window", "host") if gpus == 1 else ("compiled", "window", "host")


def fits(instances: int, path: str, gpus: int) -> bool:
    """Return whether a path works for a number of instances: NCCL needs a GPU for each."""
    return path != "compiled" or not gpus or instances <= gpus


def steps_of_jax(paths: Sequence[str]) -> list[GpuCase]:
    gpt, mlp = GpuCase("jax", JAX, GPT, PLAIN), GpuCase("jax", JAX, MLP, PLAIN)
    return [
        *(gpt, replace(gpt, is_deterministic=False)),
        *(replace(gpt, way=BY_HAND, replicas=4), *ours(gpt, (1, 1), (4, 1), (2, 2), (4, 2))),
        *(replace(gpt, way=OURS, replicas=2, instances=2, exchange=path) for path in paths if path == "host"),
        *(mlp, replace(mlp, is_deterministic=False), *ours(mlp, (1, 1), (4, 1), (2, 2))),
    ]


def steps_of_torch(paths: Sequence[str], gpus: int) -> list[GpuCase]:
    gpt, mlp = GpuCase("torch", TORCH, GPT, PLAIN), GpuCase("torch", TORCH, MLP, PLAIN)
    ddp = [replace(gpt, way=DDP, replicas=2, instances=2)] * (gpus != 1)
    return [
        *(gpt, replace(gpt, is_deterministic=False), *ddp, *ours(gpt, (1, 1), (4, 1), (2, 2), (4, 2))),
        *(replace(gpt, way=OURS, replicas=2, instances=2, exchange=path) for path in paths if path == "host"),
        *(mlp, replace(mlp, is_deterministic=False), *ours(mlp, (1, 1), (4, 1), (2, 2))),
    ]


def ours(plain: GpuCase, *spreads: tuple[int, int]) -> list[GpuCase]:
    """Return cases of our Trainer for R replicas on n instances; the Trainer chooses the exchange."""
    return [replace(plain, way=OURS, replicas=replicas, instances=instances) for replicas, instances in spreads]


def words_of(case: GpuCase) -> set[str]:
    words = {case.part, case.framework, case.model, *case.way.split(), case.exchange}
    return words | {f"R={case.replicas}", f"n={case.instances}", *([] if case.is_deterministic else ["default"])}


def is_wanted(case: GpuCase, alternatives: Sequence[Sequence[str]] | None) -> bool:
    return alternatives is None or any(set(words) <= words_of(case) for words in alternatives)


# ---- measuring


def measured(cases: Sequence[GpuCase], options: argparse.Namespace, gpus: int) -> Iterator[Row]:
    """Yield the figures of each case; cases of a wave start together and are measured one after another."""
    end = time.monotonic() + options.seconds
    with ThreadPoolExecutor() as threads:
        for together in waves(cases, options.at_once if gpus else 1.0):
            if (left_s := end - time.monotonic()) < LEAST_S:
                yield from (failed(case, "no time left") for case in together)
                continue
            effort = Effort(options.steps, options.turn_s, min(options.limit_s, left_s), min(ANSWER_S, left_s))
            jobs = [GpuJob(case, effort) for case in together]
            list(threads.map(GpuJob.start, jobs))
            for job in jobs:
                yield job.measure() if time.monotonic() < end else failed(job.case, "no time left")
            list(threads.map(GpuJob.close, jobs))


def waves(cases: Sequence[GpuCase], room: float) -> Iterator[list[GpuCase]]:
    """Yield groups of neighbouring cases whose processes fit together; room is counted in GPTs."""
    wave: list[GpuCase] = []
    for case in cases:
        if wave and sum(map(room_of, [*wave, case])) > room:
            yield wave
            wave = []
        wave.append(case)
    if wave:
        yield wave


def room_of(case: GpuCase) -> float:
    return case.instances * (1.0 if case.model == GPT else 0.5)


def failed(case: GpuCase, reason: str) -> Row:
    return {**asdict(case), "error": reason}


# ---- the table


def print_table(rows: Sequence[Row], gpus: int) -> None:
    devices = sorted({row["device"] for row in rows if "device" in row})
    print(f"{gpus or 'no'} GPU{'s' * (gpus > 1)}: {', '.join(devices)}" + " (small models)" * (not gpus))
    print(HEADING)
    for row in rows:
        print(formatted(row, rows))


def formatted(row: Row, rows: Sequence[Row]) -> str:
    name = " ".join([row["framework"], row["model"], row["way"]]) + " default" * (not row["is_deterministic"])
    exchange = (row.get("chosen") or f"{row['exchange']}?") if row["instances"] > 1 else ""
    begin = f"{name:<23}{row['replicas']:3}{row['instances']:3} {exchange:<10}"
    if "error" in row:
        return begin + row["error"][:80]
    same, default = plain_of(row, rows, True), plain_of(row, rows, False)
    return (
        f"{begin}{figure(row, 'queue_ms', 9)}{ratio(row, same, 'queue_ms', 7)}{ratio(row, default, 'queue_ms', 8)}"
        f"{figure(row, 'read_ms', 9)}{ratio(row, same, 'read_ms', 7)}"
        f"{row['peak_mb']:9.0f}{ratio(row, same, 'peak_mb', 7)}  {row['bits'][:8]}"
    )


def plain_of(row: Row, rows: Sequence[Row], deterministic: bool) -> Row | None:
    """Return the row of the plain program of the same model, with the flags of a row or the default flags."""
    wanted = (row["framework"], row["model"], PLAIN, deterministic and row["is_deterministic"])
    found = (
        each for each in rows if tuple(each[key] for key in ("framework", "model", "way", "is_deterministic")) == wanted
    )
    return next(found, None)


def figure(row: Row, key: str, width: int) -> str:
    return f"{row[key]:{width}.2f}" if key in row else f"{'-':>{width}}"


def ratio(row: Row, other: Row | None, key: str, width: int) -> str:
    if other is None or key not in row or key not in other:
        return f"{'-':>{width}}"
    return f"{row[key] / other[key]:{width}.2f}"


def against_by_hand(rows: Sequence[Row]) -> list[str]:
    """Return lines with our times relative to the program written by hand, on one instance."""
    keys = "framework", "model", "replicas", "is_deterministic", "instances"
    lines = []
    for row, hand in itertools.product(rows, rows):
        if (row["way"], hand["way"]) == (OURS, BY_HAND) and all(row[key] == hand[key] for key in keys):
            words = f"{row['framework']} {row['model']} ours, R={row['replicas']}, n=1, relative to by hand:"
            lines.append(f"{words} queue{ratio(row, hand, 'queue_ms', 6)}, read{ratio(row, hand, 'read_ms', 6)}")
    return lines


def other_bits(rows: Sequence[Row]) -> list[str]:
    """Return a complaint for each framework, model and R with different fingerprints."""
    found: dict[tuple[str, str, int], dict[str, str]] = {}
    for row in rows:
        if row.get("bits") and row["is_deterministic"]:
            key = row["framework"], row["model"], row["replicas"]
            found.setdefault(key, {})[f"n={row['instances']} {row['exchange']}"] = row["bits"]
    return [
        f"DIFFERENT BITS: {framework} {model} R={replicas}: "
        + ", ".join(f"{spread} {' '.join(each[:8] for each in bits.split())}" for spread, bits in spreads.items())
        for (framework, model, replicas), spreads in found.items()
        if len(set(spreads.values())) > 1 or any(" " in bits for bits in spreads.values())
    ]


if __name__ == "__main__":
    raise SystemExit(main())
