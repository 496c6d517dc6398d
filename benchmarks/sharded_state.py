"""The gain of sharded optimizer state: bytes of state and peak memory of an instance, with and without sharding.

    python benchmarks/sharded_state.py [--instances 2 4] [--width 1792] [--batch-size 64] [--rounds 3] [--steps 5]
                                       [--json PATH]

Instances with one replica each train an MLP with four hidden layers of the given width by Adam (12.9 million variables,
103 MB of state). Both ways take turns, in processes of their own. "state" is the optimizer state of an instance in
XLA's buffers. "peak" is the peak of resident memory after the first steps. "training" is the peak without the memory
from before the variables were made. Each is that of the largest instance. Memory that instances of a host share counts
for each of them. In MiB, medians over the rounds. MALLOC_MMAP_THRESHOLD_ is set so that freed blocks of 1 MiB go back
to the system: by default the C library keeps some blocks below 32 MiB, which hides the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from resident_memory import MIB
from timing import Machine, command_line, mpirun_command, one_core_each, output_lines

RANK_PROGRAM = Path(__file__).with_name("sharded_state_rank.py")
SETTINGS = ("instances", "width", "batch_size", "rounds", "steps")
WAYS: dict[str, list[str]] = {"whole": [], "sharded": ["--sharded"]}
MEASURED = ("state_bytes", "peak_bytes", "training_bytes", "ms_per_step")

Figures = dict[str, Any]


def main() -> None:
    options = read_options()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(MIB)  # of the instances
    machine = Machine()
    print(f"an MLP of width {options.width}, batch {options.batch_size} per replica; MiB of an instance, medians")
    titles = ("instances", "", "state", "peak", "training", "ms a step")
    print("".join(f"{title:>11}" for title in titles), flush=True)
    rows = [measure_and_print(instances, options) for instances in options.instances]
    machine.write(options, SETTINGS, rows=rows)


def read_options() -> argparse.Namespace:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--instances", type=int, nargs="+", default=[2, 4], metavar="N", help="instances with one replica each (2 4)")
    add("--width", type=int, default=1792, metavar="N", help="width of the hidden layers (%(default)s)")
    add("--batch-size", type=int, default=64, metavar="N", help="rows per replica (%(default)s)")
    add("--rounds", type=int, default=3, metavar="N", help="turns of each way (%(default)s)")
    add("--steps", type=int, default=5, metavar="N", help="steps of a turn (%(default)s)")
    add("--limit-s", type=float, default=300.0, metavar="SECONDS", help="time limit of a turn (%(default)s)")
    return parser.parse_args()


def measure_and_print(instances: int, options: argparse.Namespace) -> Figures:
    """Measure both ways in turns, print them, and return one row."""
    cpus = one_core_each(instances)
    turns: dict[str, list[Figures]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way, words in WAYS.items():
            turns[way].append(train(cpus, words, options))
    found = {way: {name: median(turn[name] for turn in of_way) for name in MEASURED} for way, of_way in turns.items()}
    ratios = {name: found["sharded"][name] / found["whole"][name] for name in MEASURED}
    for way in WAYS:
        print_line(instances, way, found[way], MIB)
    print_line(instances, "ratio", ratios, 1)
    fingerprints = {turn["variables_sha256"] for of_way in turns.values() for turn in of_way}
    return {
        "instances": instances,
        **found,
        "sharded_over_whole": ratios,
        "rounds": turns,
        "same_bits": len(fingerprints) == 1,
    }


def train(cpus: Sequence[str], words: Sequence[str], options: argparse.Namespace) -> Figures:
    """Train in new processes, and return the figures."""
    sizes = map(str, (options.width, options.batch_size, options.steps))
    lines = list(
        output_lines(mpirun_command(cpus, [sys.executable, str(RANK_PROGRAM), *sizes, *words]), options.limit_s)
    )
    figures: Figures = json.loads(lines[-1])
    return {**figures, "training_bytes": figures["peak_bytes"] - figures["bytes_before"]}


def print_line(instances: int, name: str, figures: Mapping[str, float], unit: int) -> None:
    """Print the figures of a way, in units of `unit` bytes, or their ratios."""
    cells = [f"{figures[name] / (unit if name.endswith('bytes') else 1):.3f}" for name in MEASURED]
    print("".join(f"{cell:>11}" for cell in (instances, name, *cells)), flush=True)


if __name__ == "__main__":
    main()
