"""All-reduces of this checkout, against those of another commit, in turns.

The ranks of both versions run all the time, one core per rank, those that have no turn asleep. Usage, in a checkout:

    python benchmarks/against_all_reduce.py COMMIT [--instances 2] [--replicas 1 2] [--sizes 1K 64K] [--json PATH]

Columns: us for an all-reduce of the slowest rank, before and now, medians of turns; the median of their ratios within a
turn, and the ratio of the shortest turns; for the window (result in shared memory, as a step uses it) and the ring.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import control
from against import WAYS, checked_out, finding
from all_reduce import in_units, size
from timing import ROOT, OtherLoad, describe_machine, mpirun_command, one_core_each, write_figures

RANK_PROGRAM = Path(__file__).with_name("against_all_reduce_rank.py")
MECHANISMS = ("window", "ring")
SETTINGS = ("commit", "instances", "replicas", "sizes", "rounds", "turn_s")


def main() -> None:
    options = read_options()
    machine = describe_machine()
    cpus = one_core_each(options.instances)
    load = OtherLoad()
    print(f"{options.instances} instances, {options.commit} and now; us, medians of {options.rounds} turns")
    print(f"{'way':<8}{'size':>9}{'replicas':>9}{'before':>10}{'now':>10}{'ratio':>8}{'of least':>10}")
    with tempfile.TemporaryDirectory() as folder, control.Coordinator(folder, options.limit_s) as coordinator:
        roots = checked_out(options.commit, Path(folder) / "before"), ROOT
        versions = {
            way: coordinator.start(way, options.instances, [worker(root, coordinator.path, way, cpus)], finding(root))
            for way, root in zip(WAYS, roots, strict=True)
        }
        rows = []
        for mechanism in MECHANISMS:
            for nbytes in options.sizes:
                for replicas in options.replicas:
                    rows.append(row_of(versions, mechanism, nbytes, replicas, options))
                    print(formatted(rows[-1]), flush=True)
    load.warn()
    write_figures(options, SETTINGS, machine, load, rows=rows)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("commit", nargs="?", default="HEAD", help="of this repository; without one HEAD, for changes to be committed")
    add("--instances", type=int, default=2, metavar="N", help="(%(default)s)")
    add("--replicas", type=int, nargs="+", default=[1, 2], metavar="N", help="local replicas per instance (1 2)")
    sizes = [1 << 10, 1 << 16, 1 << 20, 1 << 24]
    add("--sizes", type=size, nargs="+", default=sizes, metavar="BYTES", help="of an array (1K 64K 1M 16M)")
    add("--rounds", type=int, default=40, metavar="N", help="turns of each version (%(default)s)")
    add("--turn-s", type=float, default=0.05, metavar="S", help="how long a turn takes, about (%(default)s)")
    add("--limit-s", type=float, default=600.0, metavar="S", help="how long a turn may take (%(default)s)")
    add("--json", metavar="PATH", help="write the figures to this file")
    return parser.parse_args()


def worker(root: Path, path: str, way: str, cpus: tuple[str, ...]) -> list[str]:
    """The ranks of a version."""
    return mpirun_command(cpus, [sys.executable, str(RANK_PROGRAM), path, way])


def row_of(
    versions: dict[str, control.Group], mechanism: str, nbytes: int, replicas: int, options: argparse.Namespace
) -> dict[str, Any]:
    case = {"mechanism": mechanism, "nbytes": nbytes, "replicas": replicas}
    for group in versions.values():
        group.ask(do="prepare", **case)
    [*firsts] = versions["now"].ask(do="reduce", repeats=20)
    repeats = max(5, round(options.turn_s / max(firsts)))
    rounds_us: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(options.rounds):
        for way in WAYS if turn % 2 else reversed(WAYS):
            rounds_us[way].append(1e6 * max(versions[way].ask(do="reduce", repeats=repeats)))
    return {
        **case,
        "us": {way: median(values) for way, values in rounds_us.items()},
        "rounds_us": rounds_us,
        "now_over_before": median(now / was for now, was in zip(rounds_us["now"], rounds_us["before"], strict=True)),
        "least_over_least": min(rounds_us["now"]) / min(rounds_us["before"]),
    }


def formatted(row: dict[str, Any]) -> str:
    return (
        f"{row['mechanism']:<8}{in_units(row['nbytes']):>9}{row['replicas']:>9}{row['us']['before']:>10.2f}"
        f"{row['us']['now']:>10.2f}{row['now_over_before']:>8.3f}{row['least_over_least']:>10.3f}"
    )


if __name__ == "__main__":
    main()
