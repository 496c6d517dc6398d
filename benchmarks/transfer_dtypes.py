"""The gain of gradients that travel in 16 bits: two workers over a slow link, compared with float32.

Run as root: the workers are on two hosts of the bed of tests/cluster. Each has one core and one replica, and trains the
MLP of `train_step.py`; both dtypes take turns. Usage:

    python benchmarks/transfer_dtypes.py [--dtype bfloat16] [--batch-sizes 64 1024] [--rate 200mbit] [--delay-ms 1]

Columns, in ms per step, medians: "compute" is a step of one worker alone with the same batch; "communication" is the
time that a ring needs on the link at its nominal rate for float32; then a step with each dtype.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import training_task
from cluster import tf_config
from control import Coordinator, Group
from hosts import bytes_per_s, hosts
from timing import (
    Machine,
    as_strategies_do,
    command_line,
    environment,
    medians,
    one_core_each,
    pinned_command,
)

if TYPE_CHECKING:
    from beds import Bed

PROGRAM = Path(__file__).with_name("training_jax.py")
MODEL = "mlp"
WORKERS = 2
STRATEGY = "multi-worker"
PORTS = (4002, 4003)
BATCH_SIZES = (64, 1024)
DTYPES = ("bfloat16", "float16")
SETTINGS = ("dtype", "rate", "delay_ms", "rounds", "steps")


@dataclass(frozen=True)
class Place:
    """The hosts and cores of the workers.

    Attributes:
        bed: Hosts.
        bytes_per_s: Rate of a link, headers included.
        cpus: Core of each worker.
        limit_s: Time limit of an answer, in seconds.
    """

    bed: Bed
    bytes_per_s: float
    cpus: tuple[str, ...]
    limit_s: float


def main() -> None:
    options = read_options()
    machine = Machine()
    cpus = one_core_each(WORKERS)
    with hosts(WORKERS) as bed:
        bed.link("all", f"rate={options.rate}", *([f"delay={options.delay_ms:g}ms"] if options.delay_ms else []))
        print(header(options), flush=True)
        place = Place(bed, bytes_per_s(options.rate), cpus, options.limit_s)
        rows = [measure_and_print(batch_size, place, options) for batch_size in options.batch_sizes]
    machine.write(options, SETTINGS, rows=rows)
    differing = [str(row["batch_size"]) for row in rows if not row["has_same_bits"]]
    if differing:
        raise SystemExit(f"the fingerprints of the variables differ with batches of {', '.join(differing)}")
    print("fingerprints: equal on both workers")


def read_options() -> argparse.Namespace:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--dtype", choices=DTYPES, default=DTYPES[0], help="dtype to compare with float32 (%(default)s)")
    add("--batch-sizes", type=int, nargs="+", default=BATCH_SIZES, metavar="N", help="rows per worker (%(default)s)")
    add("--rate", type=rate, default="200mbit", help="rate of each direction, in kbit, mbit or gbit (%(default)s)")
    add("--delay-ms", type=float, default=1.0, metavar="MS", help="delay of each direction (%(default)s)")
    add("--rounds", type=int, default=5, metavar="N", help="turns of each way (%(default)s)")
    add("--steps", type=int, default=5, metavar="N", help="steps of a turn (%(default)s)")
    add("--limit-s", type=float, default=300.0, metavar="SECONDS", help="time limit of an answer (%(default)s)")
    return parser.parse_args()


def rate(text: str) -> str:
    """Return the text unchanged if it is a rate."""
    try:
        bytes_per_s(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def measure_and_print(batch_size: int, place: Place, options: argparse.Namespace) -> dict[str, Any]:
    figures = measure(batch_size, options.dtype, place, options.rounds, options.steps)
    row = figures.row(communication_ms(place.bytes_per_s))
    row |= compare_transfers(row, options.dtype)
    columns = cells(row, options.dtype)
    if batch_size == options.batch_sizes[0]:
        print("".join(f"{title:>{width(title)}}" for title in columns))
    print("".join(f"{text:>{width(title)}}" for title, text in columns.items()), flush=True)
    return row


def width(title: str) -> int:
    return max(8, len(title) + 2)


@dataclass(frozen=True)
class Figures:
    """The measurements for one batch size.

    Attributes:
        batch_size: Rows per worker.
        times: Milliseconds per step of each turn, of both dtypes and of one worker alone ("compute").
        sent: Bytes that the interface of each worker has sent per step, of both dtypes.
        fingerprints: Fingerprints of the variables of both workers, of both dtypes.
    """

    batch_size: int
    times: dict[str, list[float]]
    sent: dict[str, list[float]]
    fingerprints: dict[str, list[str]]

    def row(self, communication: float) -> dict[str, Any]:
        """Return the figures as measured."""
        return {
            "batch_size": self.batch_size,
            "ms_per_step": {**medians(self.times), "communication": communication},
            "rounds_ms": self.times,
            "sent_bytes_per_step": self.sent,
            "fingerprints": self.fingerprints,
        }


def measure(batch_size: int, dtype: str, place: Place, rounds: int, steps: int) -> Figures:
    """Measure both dtypes and one worker alone in turns, with one batch size."""
    words: dict[str, list[str]] = {"float32": [], dtype: [dtype]}
    folder = place.bed.shared / str(batch_size)
    folder.mkdir()
    with Coordinator(folder, place.limit_s) as coordinator:
        groups = {
            name: start_workers(coordinator, name, [str(batch_size), *own], port, place)
            for port, (name, own) in zip(PORTS, words.items(), strict=True)
        }
        groups["compute"] = start_alone(coordinator, batch_size, place)
        for group in groups.values():
            take_turn(group, training_task.WARM_UP_STEPS)
        times: dict[str, list[float]] = {name: [] for name in groups}
        sent = {name: np.zeros(WORKERS) for name in groups}
        for _ in range(rounds):
            for name, group in groups.items():
                before = sent_bytes(place.bed)
                times[name].append(take_turn(group, steps))
                sent[name] += sent_bytes(place.bed) - before
        fingerprints = {name: groups[name].ask(do="fingerprint") for name in words}
    per_step = {name: (sent[name] / (rounds * steps)).tolist() for name in words}
    return Figures(batch_size, times, per_step, fingerprints)


def start_workers(coordinator: Coordinator, name: str, own: list[str], port: int, place: Place) -> Group:
    """Start one worker on each host, with their addresses in TF_CONFIG."""
    addresses = [f"{host}:{port}" for host in place.bed.names]
    words = [STRATEGY, coordinator.path, MODEL, *own]
    commands = [
        place.bed.command(host, "env", f"TF_CONFIG={tf_config(addresses, index)}", *program(words, cpu))
        for index, (host, cpu) in enumerate(zip(place.bed.names, place.cpus, strict=True))
    ]
    environ = place.bed.environ | {"POPDIST_GRPC_INSECURE": "1"}
    return coordinator.start(name, WORKERS, commands, as_strategies_do(environ, WORKERS))


def start_alone(coordinator: Coordinator, batch_size: int, place: Place) -> Group:
    command = program(["single", coordinator.path, MODEL, str(batch_size)], place.cpus[0])
    environ = environment()
    return coordinator.start("compute", 1, [command], as_strategies_do(environ, WORKERS))


def program(words: list[str], cpu: str) -> list[str]:
    return pinned_command(cpu, [sys.executable, str(PROGRAM), *words])


def take_turn(group: Group, steps: int) -> float:
    """Return milliseconds per step of the slower worker."""
    seconds: list[float] = [answer["seconds"] for answer in group.ask(do="placed", steps=steps)]
    return 1e3 * max(seconds) / steps


def sent_bytes(bed: Bed) -> np.ndarray:
    """Return the bytes that the interface of each host has sent so far."""
    return np.array([bed.sent_bytes(host) for host in bed.names], np.float64)


def communication_ms(link_bytes_per_s: float) -> float:
    """Return the time for the gradients in a ring, where each of n workers sends 2 (n - 1) / n of their bytes."""
    variables = training_task.first_variables(MODEL)
    nbytes = sum(array.nbytes for layer in variables.values() for array in layer.values())
    return 1e3 * 2 * (WORKERS - 1) / WORKERS * nbytes / link_bytes_per_s


def compare_transfers(row: dict[str, Any], dtype: str) -> dict[str, Any]:
    ms, sent = row["ms_per_step"], row["sent_bytes_per_step"]
    return {
        "faster": ms["float32"] / ms[dtype],
        "bytes_over_float32": max(sent[dtype]) / max(sent["float32"]),
        "has_same_bits": all(len(set(of_workers)) == 1 for of_workers in row["fingerprints"].values()),
    }


def header(options: argparse.Namespace) -> str:
    where = f"{options.rate} and {options.delay_ms:g} ms in each direction"
    return f"{WORKERS} workers, one core each, over a link with {where}; ms per step, medians"


def cells(row: dict[str, Any], dtype: str) -> dict[str, str]:
    """Return a row's cells by column title."""
    ms, sent = row["ms_per_step"], row["sent_bytes_per_step"]
    return {
        "batch": str(row["batch_size"]),
        "compute": f"{ms['compute']:.1f}",
        "communication": f"{ms['communication']:.1f}",
        "float32": f"{ms['float32']:.1f}",
        dtype: f"{ms[dtype]:.1f}",
        "faster": f"{row['faster']:.2f}x",
        "MB of float32": f"{max(sent['float32']) / 1e6:.2f}",
        f"MB of {dtype}": f"{max(sent[dtype]) / 1e6:.2f}",
        "MB ratio": f"{row['bytes_over_float32']:.3f}",
    }


if __name__ == "__main__":
    main()
