"""What streaming gradients saves: two workers over a slow link, with streaming and without, against the ideal.

As root: the workers are in two network namespaces, see `slow_link.py`. Each has one core and one replica, and trains
the MLP of `train_step.py`; both ways take turns. Usage:

    python benchmarks/overlap.py [--batch-sizes 1024 4096 6144] [--rate 200mbit] [--delay-ms 1] [--json PATH]

The columns, in ms per step, medians: "compute" is a step of one worker alone with the same batch; "communication" is
what the link needs at its nominal rate for the bytes that a ring has to send in each direction; "ideal" is the larger
of the two; "streaming" and "plain" are `IPUMultiWorkerStrategy` with and without `variables_on_host`; "saved" is what
streaming takes off plain.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import training_task
from cluster import tf_config
from control import Coordinator, Group
from slow_link import SlowLink, SlowLinkError, bytes_per_s, slow_link
from timing import OtherLoad, describe_machine, environment, medians, one_core_each, pinned_command

from popdist.environments import thread_pool_setting

PROGRAM = Path(__file__).with_name("training_jax.py")
MODEL = "mlp"
WORKERS = 2
PORTS = {"streaming": 4001, "plain": 4002}
KINDS = {"streaming": "streaming", "plain": "multi-worker", "compute": "single"}
SETTINGS = ("rate", "delay_ms", "rounds", "steps")
WIDTHS = {
    "batch": 7,
    "compute": 10,
    "communication": 15,
    "ideal": 8,
    "streaming": 11,
    "streaming/ideal": 17,
    "plain": 8,
    "saved": 8,
}


@dataclass(frozen=True)
class Place:
    """Where the workers run.

    Attributes:
        link: between their hosts.
        cpus: one for each worker.
        limit_s: for any answer of theirs.
    """

    link: SlowLink
    cpus: tuple[str, ...]
    limit_s: float


def main() -> None:
    options = read_options()
    machine = describe_machine()
    cpus = one_core_each(WORKERS)
    load = OtherLoad()
    try:
        with slow_link(options.rate, options.delay_ms * 1e-3) as link:
            print_header(options, link)
            place = Place(link, cpus, options.limit_s)
            rows = [measure_and_print(batch_size, place, options) for batch_size in options.batch_sizes]
    except SlowLinkError as error:
        raise SystemExit(str(error)) from error
    load.warn()
    if options.json:
        settings = {name: getattr(options, name) for name in SETTINGS}
        result = {"machine": machine, "other_load": load.share(), **settings, "delayed_by": link.delayed_by}
        Path(options.json).write_text(json.dumps({**result, "rows": rows}, indent=2) + "\n")
    differing = [str(row["batch_size"]) for row in rows if not row["has_same_bits"]]
    if differing:
        raise SystemExit(f"the fingerprints of the variables differ with batches of {', '.join(differing)}")
    print("fingerprints: the same on both workers, with streaming and without")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--batch-sizes",
        type=int,
        nargs="+",
        default=[1024, 4096, 6144],
        metavar="N",
        help="per worker (1024 4096 6144)",
    )
    add("--rate", type=rate, default="200mbit", help="of each direction, with kbit, mbit or gbit (%(default)s)")
    add("--delay-ms", type=float, default=1.0, metavar="MS", help="of each direction (%(default)s)")
    add("--rounds", type=int, default=5, metavar="N", help="turns of each way (%(default)s)")
    add("--steps", type=int, default=5, metavar="N", help="in each turn (%(default)s)")
    add("--limit-s", type=float, default=300.0, metavar="SECONDS", help="for any answer (%(default)s)")
    add("--json", metavar="PATH", help="write the figures to this file")
    return parser.parse_args()


def rate(text: str) -> str:
    """The same text, if it is a rate."""
    try:
        bytes_per_s(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def measure_and_print(batch_size: int, place: Place, options: argparse.Namespace) -> dict[str, Any]:
    row = measure(batch_size, place, options.rounds, options.steps)
    print_row(row)
    return row


def measure(batch_size: int, place: Place, rounds: int, steps: int) -> dict[str, Any]:
    """Both ways, and one worker alone, take turns with batches of one size."""
    with (
        tempfile.TemporaryDirectory(prefix="overlap-") as folder,
        Coordinator(folder, place.limit_s) as coordinator,
    ):
        groups = {way: start_workers(coordinator, way, batch_size, place) for way in PORTS}
        groups["compute"] = start_alone(coordinator, batch_size, place)
        for group in groups.values():
            take_turn(group, training_task.WARM_UP_STEPS)
        times: dict[str, list[float]] = {way: [] for way in groups}
        for _ in range(rounds):
            for way, group in groups.items():
                times[way].append(take_turn(group, steps))
        fingerprints = {way: groups[way].ask(do="fingerprint") for way in PORTS}
    return make_row(batch_size, times, communication_ms(place.link), fingerprints)


def start_workers(coordinator: Coordinator, way: str, batch_size: int, place: Place) -> Group:
    """One worker on each host of the link; TF_CONFIG has their addresses."""
    addresses = [f"{host.address}:{PORTS[way]}" for host in place.link.hosts]
    commands = [
        host.command(["env", f"TF_CONFIG={tf_config(addresses, index)}", *program(coordinator, way, batch_size, cpu)])
        for index, (host, cpu) in enumerate(zip(place.link.hosts, place.cpus, strict=True))
    ]
    environ = environment(POPDIST_GRPC_INSECURE="1")
    return coordinator.start(way, WORKERS, commands, environ | thread_pool_setting(environ, WORKERS))


def start_alone(coordinator: Coordinator, batch_size: int, place: Place) -> Group:
    command = program(coordinator, "compute", batch_size, place.cpus[0])
    environ = environment()
    return coordinator.start("compute", 1, [command], environ | thread_pool_setting(environ, WORKERS))


def program(coordinator: Coordinator, way: str, batch_size: int, cpu: str) -> list[str]:
    return pinned_command(cpu, [sys.executable, str(PROGRAM), KINDS[way], coordinator.path, MODEL, str(batch_size)])


def take_turn(group: Group, steps: int) -> float:
    """Milliseconds per step of the slower worker."""
    seconds: list[float] = [answer["seconds"] for answer in group.ask(do="placed", steps=steps)]
    return 1e3 * max(seconds) / steps


def communication_ms(link: SlowLink) -> float:
    """For the gradients, in a ring: each of n workers sends 2 (n - 1) / n of their bytes."""
    variables = training_task.first_variables(MODEL)
    nbytes = sum(array.nbytes for layer in variables.values() for array in layer.values())
    return 1e3 * 2 * (WORKERS - 1) / WORKERS * nbytes / link.bytes_per_s


def make_row(
    batch_size: int, times: dict[str, list[float]], communication: float, fingerprints: dict[str, list[str]]
) -> dict[str, Any]:
    ms = {**medians(times), "communication": communication}
    ideal = max(ms["compute"], communication)
    return {
        "batch_size": batch_size,
        "ms_per_step": ms,
        "ideal_ms": ideal,
        "streaming_over_ideal": ms["streaming"] / ideal,
        "saved_by_streaming": 1 - ms["streaming"] / ms["plain"],
        "rounds_ms": times,
        "fingerprints": fingerprints,
        "has_same_bits": len({each for of_workers in fingerprints.values() for each in of_workers}) == 1,
    }


def print_header(options: argparse.Namespace, link: SlowLink) -> None:
    where = f"{options.rate} and {options.delay_ms:g} ms (by {link.delayed_by}) in each direction"
    print(f"{WORKERS} workers, one core each, over a link with {where}; ms per step, medians")
    print("".join(f"{title:>{width}}" for title, width in WIDTHS.items()), flush=True)


def print_row(row: dict[str, Any]) -> None:
    ms = row["ms_per_step"]
    cells = {
        "batch": str(row["batch_size"]),
        "compute": f"{ms['compute']:.1f}",
        "communication": f"{ms['communication']:.1f}",
        "ideal": f"{row['ideal_ms']:.1f}",
        "streaming": f"{ms['streaming']:.1f}",
        "streaming/ideal": f"{row['streaming_over_ideal']:.2f}",
        "plain": f"{ms['plain']:.1f}",
        "saved": f"{row['saved_by_streaming']:.0%}",
    }
    print("".join(f"{cells[title]:>{width}}" for title, width in WIDTHS.items()), flush=True)


if __name__ == "__main__":
    main()
