"""How long it takes to add up the gradients of all replicas, in several ways and against the memory's bandwidth.

Starts itself under mpirun, one core per instance; all ways take turns in the same run, and the result of each is
compared with the sum in the order of the tree. Usage:

    python benchmarks/all_reduce.py [--instances 2] [--replicas 1 2] [--sizes 1K 64M] [--rounds 9] [--json PATH]
        [--backends mpi,grpc,horovod]

The columns for mpi: "window" (result in shared memory, as a step uses it), "window private" (result copied into
an array of each rank) and "ring" are ours; "mpi" adds the local replicas' arrays and calls MPI_Allreduce; "gloo" does
the same with torch, where it is installed. "bound" is (replicas + 1) x size over the bandwidth of the memory with all
ranks adding at once; what fits into the caches can be faster. `all_reduce_grpc.py` describes the columns for grpc,
`all_reduce_horovod.py` those for horovod.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import all_reduce_grpc
import all_reduce_horovod
from horovod_settings import HOROVOD_SCRIPT
from timing import OtherLoad, describe_machine, mpirun_command, one_core_each, output_lines

RANK_PROGRAM = Path(__file__).with_name("all_reduce_rank.py")
SIZES = [1024 * 4**power for power in range(9)]  # 1 KiB to 64 MiB
BACKENDS = ("mpi", "grpc", "horovod")
KEEPS_ORDER = ("window", "window_private", "ring")
UNITS = {"K": 1 << 10, "M": 1 << 20}
COLUMNS = {"window": "window", "window_private": "w. private", "ring": "ring", "mpi": "mpi", "gloo": "gloo"}


def main() -> None:
    options = read_options()
    machine = describe_machine()
    cpus = one_core_each(options.instances)
    load = OtherLoad()
    rows = list(compare_over_mpi(options, cpus)) if "mpi" in options.backends else []
    over_grpc = list(compare_over_grpc(options, cpus)) if "grpc" in options.backends else []
    over_horovod = list(compare_over_horovod(options, cpus)) if "horovod" in options.backends else []
    load.warn()
    if options.json:
        result = {"machine": machine, "other_load": load.share(), "rounds": options.rounds, "rows": rows}
        if over_grpc:
            memory, *grpc_rows = over_grpc
            result["grpc"] = {"memory": memory, "rows": grpc_rows}
        if over_horovod:
            result["horovod"] = {"rows": over_horovod}
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")
    wrong = [fault for row in rows for fault in faults(row, KEEPS_ORDER)]
    wrong += [fault for row in over_horovod for fault in faults(row, all_reduce_horovod.KEEPS_ORDER)]
    wrong += [fault for row in over_grpc[1:] for fault in all_reduce_grpc.faults(row)]
    if wrong:
        raise SystemExit("\n".join(wrong))


def compare_over_mpi(options: argparse.Namespace, cpus: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Prints and yields rows."""
    with tempfile.TemporaryDirectory(prefix="all-reduce-") as folder:
        job = {
            "sizes": options.sizes or SIZES,
            "local_replicas": options.replicas,
            "rounds": options.rounds,
            "block_s": options.block_s,
            "stream_bytes": options.stream_size,
            "rendezvous": f"{folder}/gloo",
        }
        print_header(options.instances)
        command = mpirun_command(cpus, [sys.executable, str(RANK_PROGRAM), json.dumps(job)])
        for line in output_lines(command, options.limit_s):
            row = json.loads(line)
            print_row(row)
            yield row


def compare_over_grpc(options: argparse.Namespace, cpus: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Prints and yields the extra memory and rows."""
    sizes = options.sizes or all_reduce_grpc.SIZES
    figures = all_reduce_grpc.measure(sizes, options.rounds, options.block_s, cpus)
    memory = next(figures)
    yield memory
    all_reduce_grpc.print_header()
    for row in figures:
        all_reduce_grpc.print_row(row, in_units(row["bytes"]))
        yield row
    all_reduce_grpc.print_memory(memory, in_units(memory["bytes"]))


def compare_over_horovod(options: argparse.Namespace, cpus: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Prints and yields rows."""
    print_titles(options.instances, all_reduce_horovod.COLUMNS)
    print(flush=True)
    job = all_reduce_horovod.Job(options.sizes or SIZES, options.replicas, options.rounds, options.block_s)
    for row in all_reduce_horovod.measure(job, cpus):
        print_cells(row, all_reduce_horovod.COLUMNS)
        print(flush=True)
        yield row


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--backends",
        type=backend_names,
        default=["mpi"],
        metavar="NAMES",
        help="mpi, grpc, horovod, or several with commas between them: one table for each (mpi)",
    )
    add("--instances", type=int, default=2, metavar="N")
    add(
        "--replicas",
        type=int,
        nargs="+",
        default=[1, 2],
        metavar="N",
        help="local replicas per instance (1 2)",
    )
    add(
        "--sizes",
        type=size,
        nargs="+",
        metavar="BYTES",
        help="of an array; 64K and 1M are understood (1K to 64M, over gRPC 64K to 64M)",
    )
    add("--rounds", type=int, default=9, metavar="N", help="turns of each way (%(default)s)")
    add(
        "--block-s",
        type=float,
        default=0.05,
        metavar="SECONDS",
        help="about how long a turn lasts (%(default)s)",
    )
    add(
        "--stream-size",
        type=size,
        default=1 << 26,
        metavar="BYTES",
        help="of the arrays that measure bandwidth (64M)",
    )
    add("--limit-s", type=float, default=1800.0, metavar="SECONDS", help="for the whole run (%(default)s)")
    add("--json", metavar="PATH", help="write the figures to this file")
    options = parser.parse_args()
    if "grpc" in options.backends and options.instances != all_reduce_grpc.RANKS:
        parser.error(f"--instances is {options.instances}, but over gRPC a pair is measured: --instances 2")
    if "horovod" in options.backends and importlib.util.find_spec("horovod") is None:
        parser.error(f"{sys.executable} has no Horovod; build and install it with: {HOROVOD_SCRIPT}")
    return options


def backend_names(text: str) -> list[str]:
    """Names with commas between them."""
    names = text.split(",")
    unknown = [name for name in names if name not in BACKENDS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no backend here is called {unknown[0]!r}; use {', '.join(BACKENDS)}")
    return names


def size(text: str) -> int:
    """Bytes, a multiple of four: `4096`, `64K`, `1M`."""
    number, unit = (text[:-1], UNITS[text[-1].upper()]) if text[-1:].upper() in UNITS else (text, 1)
    nbytes = int(number) * unit
    if nbytes < 4 or nbytes % 4:
        raise argparse.ArgumentTypeError(f"{text} is not a multiple of 4 bytes")
    return nbytes


def faults(row: dict[str, Any], keeps_order: Collection[str]) -> list[str]:
    """In words, what is wrong with the results of a row; to the last bit in the ways that keep the order."""
    where = f"{row['bytes']} bytes, {row['local_replicas']} local replicas"
    return [
        f"{name}: the sum of {where} is wrong"
        for name, way in row["ways"].items()
        if not way["has_same_bits" if name in keeps_order else "is_close"]
    ]


def print_header(instances: int) -> None:
    print_titles(instances, COLUMNS)
    print(f"{'bound':>10}{'GB/s':>7}", flush=True)


def print_row(row: dict[str, Any]) -> None:
    print_cells(row, COLUMNS)
    print(f"{row['bound_ms']:>10.4f}{row['bandwidth_gb_per_s']:>7.1f}", flush=True)


def print_titles(instances: int, columns: Mapping[str, str]) -> None:
    """All of the header but the end of its second line."""
    print(f"{instances} instances, one core each; medians in ms, and in brackets how many times faster than mpi")
    print(f"{'size':>7} {'replicas':>9}{''.join(f'{title:>18}' for title in columns.values())}", end="")


def print_cells(row: dict[str, Any], columns: Mapping[str, str]) -> None:
    """All of a row but the end of its line."""
    replicas = f"{row['instances']} x {row['local_replicas']}"
    cells = "".join(cell(row["ways"].get(name)) for name in columns)
    print(f"{in_units(row['bytes']):>7} {replicas:>9}{cells}", end="")


def cell(way: dict[str, Any] | None) -> str:
    return f"{'-':>18}" if way is None else f"{way['ms']:>10.4f} ({way['times_faster_than_mpi']:>4.2f}x)"


def in_units(nbytes: int) -> str:
    for letter, unit in reversed(UNITS.items()):
        if nbytes % unit == 0:
            return f"{nbytes // unit} {letter}iB"
    return f"{nbytes} B"


if __name__ == "__main__":
    main()
