"""All-reduces of this checkout against those of another commit or checkout.

The ranks of both versions run all the time and sleep between their turns, on one core per rank if there are enough.
Usage, in a checkout:

    python benchmarks/against_all_reduce.py COMMIT [--over window ring grpc] [--instances 2] [--replicas 1 2]
        [--sizes 1K 64K] [--json PATH]
    python benchmarks/against_all_reduce.py --against FOLDER ...

Columns: us for an all-reduce of the slowest rank, before and now, medians of turns; the median of their ratios within a
turn with its quartiles, and the ratio of the shortest turns. Rows: the window (result in shared memory, as a step uses
it), messages over MPI ("ring"), and workers over gRPC on loopback. Sums of this checkout must have the bits of the
tree. Sums of the other version must be close, because other commits may add in another order.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import control
from against import WAYS, checked_out, finding
from all_reduce import RANK_PROGRAM, in_units, size
from cluster import free_addresses
from timing import ROOT, Machine, command_line, mpirun_command, one_core_each, pinned_command

BACKENDS = {"window": "mpi", "ring": "mpi", "grpc": "grpc"}  # by what is measured
SETTINGS = ("instances", "replicas", "sizes", "rounds", "turn_s")
CHECKS = {"before": "is_close", "now": "has_same_bits"}

Versions = dict[str, control.Group]


def main() -> None:
    options = read_options()
    machine = Machine()
    cpus = one_core_each(options.instances)
    other = str(options.against or options.commit)
    print(f"{options.instances} instances, {other} and now; us, medians of {options.rounds} turns")
    print(f"{'over':<8}{'size':>9}{'replicas':>9}{'before':>11}{'now':>11}{'ratio':>8}{'quarters':>14}{'of least':>10}")
    with tempfile.TemporaryDirectory() as folder, control.Coordinator(folder, options.limit_s) as coordinator:
        before = options.against.resolve() if options.against else checked_out(options.commit, Path(folder) / "before")
        rows = []
        for row in compare(coordinator, before, cpus, options):
            rows.append(row)
            print(formatted(row), flush=True)
    machine.write(options, SETTINGS, before=other, rows=rows)
    if wrong := [fault for row in rows for fault in faults(row)]:
        raise SystemExit("\n".join(wrong))


def read_options() -> argparse.Namespace:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("commit", nargs="?", default="HEAD", help="commit of this repository (HEAD, to measure uncommitted changes)")
    add("--against", type=Path, metavar="FOLDER", help="checkout to compare with, in place of a commit")
    add("--over", nargs="+", choices=BACKENDS, default=list(BACKENDS), help="mechanisms to measure (all)")
    add("--instances", type=int, default=2, metavar="N", help="(%(default)s)")
    add("--replicas", type=int, nargs="+", default=[1, 2], metavar="N", help="local replicas per instance (1 2)")
    sizes = [1 << 10, 1 << 16, 1 << 20, 1 << 24]
    add("--sizes", type=size, nargs="+", default=sizes, metavar="BYTES", help="sizes of the array (1K 64K 1M 16M)")
    add("--rounds", type=int, default=40, metavar="N", help="turns of each version (%(default)s)")
    add("--turn-s", type=float, default=0.05, metavar="S", help="approximate length of a turn (%(default)s)")
    add("--limit-s", type=float, default=600.0, metavar="S", help="time limit of a turn (%(default)s)")
    return parser.parse_args()


def compare(
    coordinator: control.Coordinator, before: Path, cpus: Sequence[str], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield a row for each case."""
    roots = dict(zip(WAYS, (before, ROOT), strict=True))
    started: dict[str, Versions] = {}
    for over, nbytes, replicas in itertools.product(options.over, options.sizes, options.replicas):
        backend = BACKENDS[over]
        if backend not in started:
            started[backend] = {way: start(coordinator, backend, way, root, cpus) for way, root in roots.items()}
        yield row_of(started[backend], {"way": over, "nbytes": nbytes, "replicas": replicas}, options)


def start(coordinator: control.Coordinator, backend: str, way: str, root: Path, cpus: Sequence[str]) -> control.Group:
    """Start the ranks of a version."""
    name = f"{way}, {backend}"
    program = [sys.executable, RANK_PROGRAM, coordinator.path, name, backend]
    if backend == "mpi":
        commands = [mpirun_command(cpus, program)]
    else:
        words = free_addresses(len(cpus))
        commands = [pinned_command(cpu, [*program, str(rank), *words]) for rank, cpu in enumerate(cpus)]
    return coordinator.start(name, len(cpus), commands, finding(root))


def row_of(versions: Versions, case: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Measure both versions in turns; each version begins half of the rounds."""
    checks = {way: versions[way].ask(do="prepare", **case) for way in WAYS}
    ask = {"do": "turn", "way": case["way"]}
    repeats = max(1, round(options.turn_s / max(versions["now"].ask(**ask, repeats=3))))
    rounds_us: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(options.rounds):
        for way in WAYS if turn % 2 else reversed(WAYS):
            rounds_us[way].append(1e6 * max(versions[way].ask(**ask, repeats=repeats)))
    is_right = {way: all(check[CHECKS[way]] for check in checks[way]) for way in WAYS}
    return {**case, **compared(rounds_us), "is_right": is_right}


def compared(rounds_us: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians and ratios of the times of at least two turns."""
    ratios = [now / was for now, was in zip(rounds_us["now"], rounds_us["before"], strict=True)]
    lower, middle, upper = quantiles(ratios, n=4, method="inclusive")
    return {
        "us": {way: median(values) for way, values in rounds_us.items()},
        "rounds_us": rounds_us,
        "now_over_before": middle,
        "quarters": [lower, upper],
        "least_over_least": min(rounds_us["now"]) / min(rounds_us["before"]),
    }


def faults(row: dict[str, Any]) -> list[str]:
    """Return a sentence for each wrong sum of a row."""
    case = f"{row['way']}, {in_units(row['nbytes'])}, {row['replicas']} local replicas"
    return [f"{way}: the sum over {case} is wrong" for way, is_right in row["is_right"].items() if not is_right]


def formatted(row: dict[str, Any]) -> str:
    quarters = " - ".join(f"{ratio:.2f}" for ratio in row["quarters"])
    return (
        f"{row['way']:<8}{in_units(row['nbytes']):>9}{row['replicas']:>9}{row['us']['before']:>11.2f}"
        f"{row['us']['now']:>11.2f}{row['now_over_before']:>8.3f}{quarters:>14}{row['least_over_least']:>10.3f}"
    )


if __name__ == "__main__":
    main()
