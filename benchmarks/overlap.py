"""The gain of streaming gradients: two workers over a slow link, with and without streaming, against the ideal.

Run as root: the workers are on two hosts of the bed of tests/cluster. Each has one core and one replica, and trains the
MLP of `train_step.py`; both ways take turns. Usage:

    python benchmarks/overlap.py [--batch-sizes 1024 4096 6144] [--rate 200mbit] [--delay-ms 1] [--json PATH]

Columns, in ms per step, medians: "compute" is a step of one worker alone with the same batch; "communication" is the
time that a ring needs on the link at its nominal rate; "ideal" is the larger of the two; "streaming" and "plain" are
`IPUMultiWorkerStrategy` with and without `variables_on_host`; "saved" is the share of "plain" that streaming saves.
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
BATCH_SIZES = (1024, 4096, 6144)
BATCH_SIZES_OF_TRANSFERS = (64, 1024)
DTYPES = ("float16", "bfloat16", "int8")
SETTINGS = ("gradient_transfer_dtype", "rate", "delay_ms", "rounds", "steps")


@dataclass(frozen=True)
class Way:
    """A way in which two workers train.

    Attributes:
        port: Port on which the workers listen.
        kind: Kind of their strategy.
        dtype: Dtype in which gradients travel; None for their own dtype, float32.
    """

    port: int
    kind: str
    dtype: str | None = None


PLAIN = Way(4002, "multi-worker")
STREAMING = {"streaming": Way(4001, "streaming"), "plain": PLAIN}


def transfers(dtype: str) -> dict[str, Way]:
    """Return two ways that differ in the dtype in which gradients travel."""
    return {"float32": PLAIN, dtype: Way(4003, PLAIN.kind, dtype)}


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
    both = "" if options.gradient_transfer_dtype else ", with streaming and without"
    print(f"fingerprints: equal on both workers{both}")


def read_options() -> argparse.Namespace:
    parser = command_line(__doc__)
    add = parser.add_argument
    add(
        "--batch-sizes",
        type=int,
        nargs="+",
        metavar="N",
        help=f"rows per worker ({listed(BATCH_SIZES)}; with a transfer dtype {listed(BATCH_SIZES_OF_TRANSFERS)})",
    )
    add("--gradient-transfer-dtype", choices=DTYPES, help="compare this dtype with float32, not streaming with plain")
    add("--rate", type=rate, default="200mbit", help="rate of each direction, in kbit, mbit or gbit (%(default)s)")
    add("--delay-ms", type=float, default=1.0, metavar="MS", help="delay of each direction (%(default)s)")
    add("--rounds", type=int, default=5, metavar="N", help="turns of each way (%(default)s)")
    add("--steps", type=int, default=5, metavar="N", help="steps of a turn (%(default)s)")
    add("--limit-s", type=float, default=300.0, metavar="SECONDS", help="time limit of an answer (%(default)s)")
    options = parser.parse_args()
    if options.batch_sizes is None:
        options.batch_sizes = list(BATCH_SIZES_OF_TRANSFERS if options.gradient_transfer_dtype else BATCH_SIZES)
    return options


def listed(sizes: tuple[int, ...]) -> str:
    return " ".join(map(str, sizes))


def rate(text: str) -> str:
    """Return the text unchanged if it is a rate."""
    try:
        bytes_per_s(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def measure_and_print(batch_size: int, place: Place, options: argparse.Namespace) -> dict[str, Any]:
    dtype = options.gradient_transfer_dtype
    ways = transfers(dtype) if dtype else STREAMING
    figures = measure(batch_size, ways, place, options.rounds, options.steps)
    row = figures.row(communication_ms(place.bytes_per_s))
    row |= compare_transfers(row, dtype) if dtype else compare_streaming(row)
    columns = cells(row, dtype)
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
        times: Milliseconds per step of each turn, of both ways and of one worker alone ("compute").
        sent: Bytes that the interface of each worker has sent per step, of both ways.
        fingerprints: Fingerprints of the variables of both workers, of both ways.
    """

    batch_size: int
    times: dict[str, list[float]]
    sent: dict[str, list[float]]
    fingerprints: dict[str, list[str]]

    def row(self, communication: float) -> dict[str, Any]:
        """Return the figures that both comparisons share."""
        return {
            "batch_size": self.batch_size,
            "ms_per_step": {**medians(self.times), "communication": communication},
            "rounds_ms": self.times,
            "sent_bytes_per_step": self.sent,
            "fingerprints": self.fingerprints,
        }


def measure(batch_size: int, ways: dict[str, Way], place: Place, rounds: int, steps: int) -> Figures:
    """Measure both ways and one worker alone in turns, with one batch size."""
    folder = place.bed.shared / str(batch_size)
    folder.mkdir()
    with Coordinator(folder, place.limit_s) as coordinator:
        groups = {name: start_workers(coordinator, name, way, batch_size, place) for name, way in ways.items()}
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
        fingerprints = {name: groups[name].ask(do="fingerprint") for name in ways}
    per_step = {name: (sent[name] / (rounds * steps)).tolist() for name in ways}
    return Figures(batch_size, times, per_step, fingerprints)


def start_workers(coordinator: Coordinator, name: str, way: Way, batch_size: int, place: Place) -> Group:
    """Start one worker on each host, with their addresses in TF_CONFIG."""
    addresses = [f"{host}:{way.port}" for host in place.bed.names]
    words = [way.kind, coordinator.path, MODEL, str(batch_size), *([way.dtype] if way.dtype else [])]
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


def compare_streaming(row: dict[str, Any]) -> dict[str, Any]:
    ms = row["ms_per_step"]
    ideal = max(ms["compute"], ms["communication"])
    return {
        "ideal_ms": ideal,
        "streaming_over_ideal": ms["streaming"] / ideal,
        "saved_by_streaming": 1 - ms["streaming"] / ms["plain"],
        "has_same_bits": len({each for of_workers in row["fingerprints"].values() for each in of_workers}) == 1,
    }


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


def cells(row: dict[str, Any], dtype: str | None) -> dict[str, str]:
    """Return a row's cells by column title."""
    ms = row["ms_per_step"]
    first = {
        "batch": str(row["batch_size"]),
        "compute": f"{ms['compute']:.1f}",
        "communication": f"{ms['communication']:.1f}",
    }
    if dtype is None:
        return first | {
            "ideal": f"{row['ideal_ms']:.1f}",
            "streaming": f"{ms['streaming']:.1f}",
            "streaming/ideal": f"{row['streaming_over_ideal']:.2f}",
            "plain": f"{ms['plain']:.1f}",
            "saved": f"{row['saved_by_streaming']:.0%}",
        }
    sent = row["sent_bytes_per_step"]
    return first | {
        "float32": f"{ms['float32']:.1f}",
        dtype: f"{ms[dtype]:.1f}",
        "faster": f"{row['faster']:.2f}x",
        "MB of float32": f"{max(sent['float32']) / 1e6:.2f}",
        f"MB of {dtype}": f"{max(sent[dtype]) / 1e6:.2f}",
        "MB ratio": f"{row['bytes_over_float32']:.3f}",
    }


if __name__ == "__main__":
    main()
