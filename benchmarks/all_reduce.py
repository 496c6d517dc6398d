"""Times of all-reduces of all replicas' gradients: our mechanisms, other libraries, and the memory's bandwidth.

Each instance has one core, and all ways take turns in the same run. Each result is compared with the sum in tree order.
Usage:

    python benchmarks/all_reduce.py [--instances 2] [--replicas 1 2] [--sizes 1K 64M] [--rounds 9] [--json PATH]
        [--backends mpi,grpc,horovod]

There is a table for each backend. Columns for mpi: "window" (result in shared memory, as a step uses it),
"window_private" (result copied into an array of each rank) and "ring" are ours; "mpi" adds the local replicas' arrays
and calls MPI_Allreduce; "gloo" does the same with torch, if it is installed. "bound" is (replicas + 1) x size over the
bandwidth of the memory while all ranks add; arrays that fit into the caches can be faster.

For grpc: "grpc" is ours between two workers on loopback; "bare" is a pair of gRPC byte streams with the same bytes.

For horovod: "window" and "mpi" are as for mpi; "horovod" is `collectives.connect("horovod")`; "hvd" adds the local
replicas' arrays and calls Horovod's all-reduce on a tensor of torch, with the default settings of Horovod and Open MPI;
"hvd_tuned" is the same with the settings in `timing.TUNED`. A thread of Horovod never sleeps, so each of these three
has its own processes, which are stopped between their turns.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from cluster import free_addresses
from control import Coordinator, Group
from timing import (
    HOROVOD_SCRIPT,
    TUNED,
    Machine,
    command_line,
    environment,
    medians,
    mpirun_command,
    one_core_each,
    pinned_command,
)

HERE = Path(__file__).parent
RANK_PROGRAM = str(HERE / "all_reduce_rank.py")
SIZES = [1024 * 4**power for power in range(9)]  # 1 KiB to 64 MiB
FEWEST = 3  # reductions in a turn
UNITS = {"K": 1 << 10, "M": 1 << 20}
SETTINGS = ("instances", "replicas", "rounds")
PAIR = 2


@dataclass(frozen=True)
class Table:
    """The ways that a table of a backend compares.

    Attributes:
        groups: Group of processes of each way.
        reference: Way to which the others are compared.
        keeps_order: Ways whose sums have the bits of the tree.
    """

    groups: Mapping[str, str]
    reference: str
    keeps_order: Sequence[str]


OVER_MPI = ("window", "window_private", "ring", "mpi", "gloo")
OVER_HOROVOD = {"window": "mpi", "mpi": "mpi", "horovod": "horovod", "hvd": "hvd", "hvd_tuned": "hvd_tuned"}
TABLES = {
    "mpi": Table(dict.fromkeys(OVER_MPI, "mpi"), "mpi", ("window", "window_private", "ring")),
    "grpc": Table({"grpc": "grpc", "bare": "bare"}, "bare", ("grpc",)),
    "horovod": Table(OVER_HOROVOD, "mpi", ("window",)),
}


def main() -> None:
    options = read_options()
    machine = Machine()
    cpus = one_core_each(options.instances)
    rows = [row for backend in options.backends for row in compare(backend, options, cpus)]
    machine.write(options, SETTINGS, rows=rows)
    if wrong := [fault for row in rows for fault in faults(row)]:
        raise SystemExit("\n".join(wrong))


def read_options() -> argparse.Namespace:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--backends", type=backend_names, default=["mpi"], metavar="NAMES", help="names separated by commas (mpi)")
    add("--instances", type=int, default=2, metavar="N", help="(%(default)s)")
    add("--replicas", type=int, nargs="+", default=[1, 2], metavar="N", help="local replicas per instance (1 2)")
    add("--sizes", type=size, nargs="+", default=SIZES, metavar="BYTES", help="such as 4096, 64K or 1M (1K to 64M)")
    add("--rounds", type=int, default=9, metavar="N", help="turns of each way (%(default)s)")
    add("--block-s", type=float, default=0.05, metavar="S", help="approximate length of a turn (%(default)s)")
    add("--stream-size", type=size, default=1 << 26, metavar="BYTES", help="size of the bandwidth measurement (64M)")
    add("--limit-s", type=float, default=300.0, metavar="S", help="time limit of an answer (%(default)s)")
    options = parser.parse_args()
    if "grpc" in options.backends and options.instances != PAIR:
        parser.error(f"--instances is {options.instances}, but --backends grpc measures a pair: use --instances 2")
    if "horovod" in options.backends and importlib.util.find_spec("horovod") is None:
        parser.error(f"{sys.executable} has no Horovod; build and install it with: {HOROVOD_SCRIPT}")
    return options


def backend_names(text: str) -> list[str]:
    """Split names separated by commas."""
    names = text.split(",")
    unknown = [name for name in names if name not in TABLES]
    if unknown:
        raise argparse.ArgumentTypeError(f"there is no backend {unknown[0]!r}; use {', '.join(TABLES)}")
    return names


def size(text: str) -> int:
    """Convert `4096`, `64K` or `1M` to a number of bytes, a multiple of four."""
    number, unit = (text[:-1], UNITS[text[-1].upper()]) if text[-1:].upper() in UNITS else (text, 1)
    nbytes = int(number) * unit
    if nbytes < 4 or nbytes % 4:
        raise argparse.ArgumentTypeError(f"{text} is not a multiple of 4 bytes")
    return nbytes


def compare(backend: str, options: argparse.Namespace, cpus: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Print and yield a row for each size and number of local replicas."""
    with (
        tempfile.TemporaryDirectory(prefix="all-reduce-") as folder,
        Coordinator(folder, options.limit_s) as coordinator,
    ):
        kinds = dict.fromkeys(TABLES[backend].groups.values())
        started = {kind: start(coordinator, kind, cpus, f"{folder}/gloo") for kind in kinds}
        there = set(started["mpi"].ask(do="ways")[0]) if backend == "mpi" else set(TABLES[backend].groups)
        groups = {way: started[kind] for way, kind in TABLES[backend].groups.items() if way in there}
        if backend == "mpi":
            started["mpi"].ask(do="prepare_stream", nbytes=options.stream_size)
        reference = TABLES[backend].reference
        print(f"{options.instances} instances, one core each; medians in ms (how many times faster than {reference})")
        print(
            f"{'size':>7} {'replicas':>9}{''.join(f'{way:>18}' for way in groups)}{'bound':>10}{'GB/s':>7}", flush=True
        )
        for nbytes, replicas in product(options.sizes, options.replicas):
            row = {"backend": backend, "bytes": nbytes, "local_replicas": replicas, "instances": options.instances}
            row |= measure(groups, reference, nbytes, replicas, options)
            print(formatted(row), flush=True)
            yield row


def start(coordinator: Coordinator, kind: str, cpus: Sequence[str], rendezvous: str) -> Group:
    """Start the processes of a kind, one for each core."""
    if kind in ("grpc", "bare"):
        addresses = free_addresses(len(cpus))
        program = {
            "grpc": [RANK_PROGRAM, coordinator.path, kind, kind],
            "bare": [str(HERE / "bare_streams.py"), coordinator.path],
        }
        commands = [
            pinned_command(cpu, [sys.executable, *program[kind], str(rank), *addresses])
            for rank, cpu in enumerate(cpus)
        ]
        return coordinator.start(kind, len(cpus), commands, environment())
    words = [rendezvous] if kind == "mpi" else []
    program = [sys.executable, RANK_PROGRAM, coordinator.path, kind, kind.removesuffix("_tuned"), *words]
    environ = environment(**(TUNED if kind == "hvd_tuned" else {}))
    return coordinator.start(kind, len(cpus), [mpirun_command(cpus, program)], environ, is_restless=kind != "mpi")


def measure(
    groups: Mapping[str, Group], reference: str, nbytes: int, replicas: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Measure all ways in turns."""
    case = {"nbytes": nbytes, "replicas": replicas}
    checks = {way: every(group.ask(do="prepare", way=in_group(way), **case)) for way, group in groups.items()}
    turns = dict(groups) | ({"stream": groups["window"]} if "ring" in groups else {})
    repeats = {way: max(FEWEST, round(options.block_s / turn_s(turns[way], way, FEWEST))) for way in turns}
    times: dict[str, list[float]] = {way: [] for way in turns}
    for _ in range(options.rounds):
        for way, group in turns.items():
            times[way].append(1e3 * turn_s(group, way, repeats[way]))
    ms = medians(times)
    ratio = f"times_faster_than_{reference}"
    ways = {
        way: {"ms": ms[way], ratio: ms[reference] / ms[way], "rounds_ms": times[way], **checks[way]} for way in groups
    }
    if "stream" not in ms:
        return {"ways": ways}
    bandwidth = 3 * options.stream_size * options.instances / (ms["stream"] * 1e-3)
    bound_ms = 1e3 * (options.instances * replicas + 1) * nbytes / bandwidth
    return {"ways": ways, "bandwidth_gb_per_s": bandwidth * 1e-9, "bound_ms": bound_ms}


def in_group(way: str) -> str:
    """Return the name of a way inside its processes."""
    return way.removesuffix("_tuned")


def every(of_ranks: Sequence[dict[str, bool]]) -> dict[str, bool]:
    """Return for each check whether it holds on all ranks."""
    return {check: all(of_rank[check] for of_rank in of_ranks) for check in of_ranks[0]}


def turn_s(group: Group, way: str, repeats: int) -> float:
    """Return the seconds per all-reduce of the slowest rank."""
    of_ranks: list[float] = group.ask(do="turn", way=in_group(way), repeats=repeats)
    return max(of_ranks)


def faults(row: dict[str, Any]) -> list[str]:
    """Return a sentence for each wrong result of a row; ways that keep the order must have the bits of the tree."""
    keeps_order = TABLES[row["backend"]].keeps_order
    where = f"{row['bytes']} bytes, {row['local_replicas']} local replicas"
    return [
        f"{name}: the sum of {where} is wrong"
        for name, way in row["ways"].items()
        if not way.get("has_same_bits" if name in keeps_order else "is_close", True)
    ]


def formatted(row: dict[str, Any]) -> str:
    reference = TABLES[row["backend"]].reference
    cells = "".join(
        f"{way['ms']:>10.4f} ({way[f'times_faster_than_{reference}']:>4.2f}x)" for way in row["ways"].values()
    )
    bound = f"{row['bound_ms']:>10.4f}{row['bandwidth_gb_per_s']:>7.1f}" if "bound_ms" in row else ""
    return f"{in_units(row['bytes']):>7} {row['instances']} x {row['local_replicas']:<5}{cells}{bound}"


def in_units(nbytes: int) -> str:
    for letter, unit in reversed(UNITS.items()):
        if nbytes % unit == 0:
            return f"{nbytes // unit} {letter}iB"
    return f"{nbytes} B"


if __name__ == "__main__":
    main()
