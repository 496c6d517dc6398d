"""All-reduce and launch on several hosts: ours, by poprun over MPI, against MPI_Allreduce and plain mpirun.

Run as root: the hosts are network namespaces of this machine with an sshd each (the bed of tests/cluster). They share
its cores. Usage:

    python benchmarks/hosts.py [--hosts 4] [--instances 2] [--rate 200mbit] [--delay 1ms] [--sizes 64K 1M 16M]
        [--rounds 5] [--only all-reduce|launch] [--chain FOLDER] [--json PATH]

All ways take turns in the same run. "ordered" is ours; "mpi" is MPI_Allreduce in the same processes, with the same
options; "mpi ring" is a job with Open MPI's ring forced; "chain" is ours of another commit, in the folder `--chain`.
"bound" is the time of 2 (h - 1) / h arrays on a link at its nominal rate. "sent" and "received" are the traffic of the
busiest link for one all-reduce, in arrays, by the counters of the interfaces, less its idle traffic: the instances of
each job report their state to poprun on the first host five times a second. A table of launches comes before; see
`hosts_launch.py`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import hosts_launch
import pytest
from all_reduce import in_units, size
from control import Coordinator, Group
from timing import ROOT, Machine, command_line

sys.path.append(str(ROOT / "tests" / "cluster"))

from beds import Bed, open_bed  # noqa: E402

HERE = Path(__file__).parent
SIZES = [1 << 16, 1 << 20, 1 << 24]
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
WAYS = {
    "ordered": ("ours", "ordered"),
    "mpi": ("ours", "mpi"),
    "mpi ring": ("ring", "mpi"),
    "chain": ("chain", "ordered"),
}  # group, and its way
# Between hosts with several instances each, Open MPI prefers a component that ignores the choice of the ring.
RING_FORCED = "--mca coll ^han --mca coll_tuned_use_dynamic_rules 1 --mca coll_tuned_allreduce_algorithm 4"
JOBS: dict[str, Sequence[str]] = {"ours": (), "ring": ("--mpi-global-args", RING_FORCED)}
PARTS = ("all-reduce", "launch")
ANSWER_S = 300.0
IDLE_S = 4.0
SETTINGS = ("hosts", "instances", "rate", "delay", "rounds")


def main() -> None:
    options = read_options()
    machine = Machine()
    result: dict[str, Any] = {}
    with hosts(options.hosts) as bed:
        if "launch" in options.only:
            result["launch"] = hosts_launch.measure(bed, options.instances, options.rounds)
            hosts_launch.print_table(result["launch"])
        if "all-reduce" in options.only:
            bed.link("all", f"rate={options.rate}", *([f"delay={options.delay}"] if options.delay != "0" else []))
            result["rows"] = list(compare(bed, options))
    machine.write(options, SETTINGS, **result)
    if wrong := [fault for row in result.get("rows", ()) for fault in faults(row)]:
        raise SystemExit("\n".join(wrong))


def read_options() -> argparse.Namespace:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--hosts", type=int, default=4, metavar="N")
    add("--instances", type=int, default=2, metavar="N", help="instances on each host (%(default)s)")
    add("--rate", default="200mbit", help="rate of each link and direction, in tc's notation (%(default)s)")
    add("--delay", default="1ms", help="delay of a host's packets, in tc's notation; 0 for none (%(default)s)")
    add("--sizes", type=size, nargs="+", default=SIZES, metavar="BYTES", help="sizes of the array (64K 1M 16M)")
    add("--rounds", type=int, default=5, metavar="N", help="turns of each way, and launches (%(default)s)")
    add("--block-s", type=float, default=0.5, metavar="SECONDS", help="approximate length of a turn (%(default)s)")
    add("--only", choices=PARTS, nargs=1, default=PARTS, help="measure this part only")
    add("--chain", type=Path, metavar="FOLDER", help="checkout of a commit with another order of addition, to compare")
    options = parser.parse_args()
    if options.hosts < 2:
        parser.error(f"--hosts is {options.hosts}; use 2 hosts or more, because links between hosts are measured")
    return options


@contextmanager
def hosts(count: int) -> Iterator[Bed]:
    """Make the hosts; if that fails, end this program with the reason."""
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
        try:
            with open_bed(Path(folder), count) as bed:
                yield bed
        except pytest.skip.Exception as reason:
            raise SystemExit(str(reason)) from None


def bytes_per_s(rate: str) -> float:
    """Convert a rate such as "200mbit" to bytes per second."""
    number, unit = rate[:-4], rate[-4:].lower()
    try:
        bits_per_s = float(number) * UNITS[unit]
    except (KeyError, ValueError) as error:
        raise ValueError(f"{rate!r} is not a rate; write a number with one of {', '.join(UNITS)}: 200mbit") from error
    if not 0 < bits_per_s < float("inf"):
        raise ValueError(f"the rate is {rate}; it must be positive and finite")
    return bits_per_s / 8


# ---- all-reduce


def compare(bed: Bed, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Print and yield rows."""
    print_header(options)
    with Coordinator(bed.shared, ANSWER_S) as coordinator:
        folders = {name: HERE.parent for name in JOBS} | ({"chain": options.chain.resolve()} if options.chain else {})
        groups = {name: start(coordinator, bed, options.instances, name, folder) for name, folder in folders.items()}
        idle = groups["ours"].ask(do="idle", seconds=IDLE_S)
        for nbytes in options.sizes:
            row = compare_size(groups, nbytes, idle, options)
            print_row(row)
            yield row


def start(coordinator: Coordinator, bed: Bed, instances: int, name: str, folder: Path) -> Group:
    script = str(folder / "benchmarks" / "hosts_rank.py")
    program = ["env", f"PYTHONPATH={folder}", sys.executable, script, coordinator.path, name]
    command = [*hosts_launch.poprun_command(bed, instances, JOBS.get(name, ())), *program]
    return coordinator.start(name, instances * len(bed.names), [bed.command("h0", *command)], bed.environ)


def compare_size(
    groups: dict[str, Group], nbytes: int, idle: Sequence[dict[str, float]], options: argparse.Namespace
) -> dict[str, Any]:
    """Measure all ways in turns, and return one row."""
    checks = prepare(groups, nbytes)
    bound_s = 2 * (options.hosts - 1) / options.hosts * nbytes / bytes_per_s(options.rate)
    ways = list(checks)
    repeats = {way: max(1, round(options.block_s / turn(groups, way, idle, 1)["seconds"])) for way in ways}
    turns: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(options.rounds):
        for way in ways:
            turns[way].append(turn(groups, way, idle, repeats[way]))
    seconds = {way: median(each["seconds"] for each in turns[way]) for way in ways}
    return {
        "bytes": nbytes,
        "bound_ms": 1e3 * bound_s,
        "ways": {
            way: {
                "ms": 1e3 * seconds[way],
                "over_bound": seconds[way] / bound_s,
                "times_faster_than_mpi": seconds["mpi"] / seconds[way],
                "sent": median(each["sent"] for each in turns[way]) / nbytes,
                "received": median(each["received"] for each in turns[way]) / nbytes,
                "rounds_ms": [1e3 * each["seconds"] for each in turns[way]],
                **checks[way],
            }
            for way in ways
        },
    }


def prepare(groups: dict[str, Group], nbytes: int) -> dict[str, dict[str, bool]]:
    """Return for each way whether its results are right on all instances."""
    checks = {}
    for way, (group, deed) in WAYS.items():
        if group not in groups:
            continue
        answers = [answer[deed] for answer in groups[group].ask(do="prepare", nbytes=nbytes, ways=[deed])]
        checks[way] = {name: all(answer[name] for answer in answers) for name in answers[0]}
    return checks


def turn(groups: dict[str, Group], way: str, idle: Sequence[dict[str, float]], repeats: int) -> dict[str, float]:
    """Return, for one all-reduce, seconds of the slowest instance and bytes on the busiest link in each direction."""
    group, deed = WAYS[way]
    answers: list[dict[str, float]] = groups[group].ask(do="turn", way=deed, repeats=repeats)
    for answer, of_others in zip(answers, idle, strict=True):
        for name, of_a_second in of_others.items():
            answer[name] -= of_a_second * answer["seconds"]
    return {name: max(answer[name] for answer in answers) for name in answers[0]}


def faults(row: dict[str, Any]) -> list[str]:
    """Return a sentence for each wrong result of a row; ours must have the bits of the tree."""
    return [
        f"{way}: the sum of {in_units(row['bytes'])} is wrong"
        for way, figures in row["ways"].items()
        if not figures["has_same_bits" if way == "ordered" else "is_close"]
    ]


def print_header(options: argparse.Namespace) -> None:
    links = f"links of {options.rate} and {options.delay}"
    print(f"{options.hosts} hosts x {options.instances} instances, {links}, load {os.getloadavg()[0]:.1f}")
    print(f"{'ms; times the bound; sent, received / S':>16}")
    ways = [way for way in WAYS if way != "chain" or options.chain]
    print(f"{'size':>7}{'bound':>8}{''.join(f'{way:>32}' for way in ways)}{'faster than mpi':>17}", flush=True)


def print_row(row: dict[str, Any]) -> None:
    cells = "".join(
        f"{each['ms']:>10.1f} {each['over_bound']:>6.2f}x {each['sent']:>6.3f} {each['received']:>6.3f}"
        for each in row["ways"].values()
    )
    faster = row["ways"]["ordered"]["times_faster_than_mpi"]
    print(f"{in_units(row['bytes']):>7}{row['bound_ms']:>8.1f}{cells}{faster:>16.2f}x", flush=True)


if __name__ == "__main__":
    main()
