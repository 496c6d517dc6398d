"""The simulated network against the test bed: all-reduces of some sizes and instances, measured and simulated.

Run as root: the hosts are network namespaces of this machine (the bed of tests/cluster) with shaped links. First, the
cost of messages is measured between as many instances at once, and inside a host. Usage:

    python benchmarks/simulated.py [--instances 2 3 4 6 8] [--sizes 64K 1M 16M] [--rate 200mbit] [--delay 1ms]
        [--rounds 5] [--json PATH]

There is one instance per host for up to four instances; six and eight instances are two on each of three and four
hosts. The simulation does what the transport does: the comparison of calls, then the chosen plan, in pieces.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import hosts as on_hosts
import numpy as np
from all_reduce import in_units, size
from control import Coordinator
from timing import Machine, command_line

from collectives.backends.mpi import _sizes_between_hosts
from collectives.plans.choice import Width
from collectives.plans.comparing import relays
from collectives.point_to_point.link import Link, Sizes, Transfer
from collectives.point_to_point.planned import Planner
from collectives.reduction import Reduction
from collectives.simulation import Network, of_comparison, of_plan, steady_s

HOSTS = {2: (2, 1), 3: (3, 1), 4: (4, 1), 6: (3, 2), 8: (4, 2)}  # hosts, and instances on each
HEADER_BYTES = 64
BURST_BYTES = 128 << 10  # burst of the links of the bed (netns_link.sh)
SIZES = [1 << 16, 1 << 20, 1 << 24]


def main() -> None:
    options = read_options()
    machine = Machine()
    rows = [row for instances in options.instances for row in compare(instances, options)]
    error = median(abs(row["error"]) for row in rows)
    print(f"median error {100 * error:.0f} %")
    machine.write(options, (), rows=rows, median_error=error)


def read_options() -> argparse.Namespace:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--instances", type=int, nargs="+", choices=HOSTS, default=list(HOSTS), metavar="N", help="(2 3 4 6 8)")
    add("--sizes", type=size, nargs="+", default=SIZES, metavar="BYTES", help="sizes of the array (64K 1M 16M)")
    add("--rate", default="200mbit", help="rate of each link and direction, in tc's notation (%(default)s)")
    add("--delay", default="1ms", help="delay of a host's packets, in tc's notation (%(default)s)")
    add("--rounds", type=int, default=5, metavar="N", help="turns (%(default)s)")
    add("--block-s", type=float, default=0.5, metavar="SECONDS", help="approximate length of a turn (%(default)s)")
    return parser.parse_args()


def compare(instances: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Print and yield a row for each size."""
    hosts, on_each = HOSTS[instances]
    with on_hosts.hosts(hosts) as bed:
        bed.link("all", f"rate={options.rate}", f"delay={options.delay}")
        network = measured_network(bed, on_each)
        print(network)
        with Coordinator(bed.shared, on_hosts.ANSWER_S) as coordinator:
            group = on_hosts.start(coordinator, bed, on_each, "ours", on_hosts.HERE.parent)
            for nbytes in options.sizes:
                seconds = measured_s(group, nbytes, options)
                simulated = simulated_s(hosts, on_each, nbytes, network)
                error = simulated / seconds - 1
                ours = f"{1e3 * seconds:9.2f} ms measured, {1e3 * simulated:9.2f} simulated, {100 * error:+5.0f} %"
                print(f"{instances} instances on {hosts} hosts, {in_units(nbytes):>7}: {ours}", flush=True)
                yield {"instances": instances, "bytes": nbytes, "s": seconds, "simulated_s": simulated, "error": error}


def measured_s(group: Any, nbytes: int, options: argparse.Namespace) -> float:
    """Return the median over turns of the slowest instance's time for one all-reduce."""
    groups = {"ours": group}
    nothing = [{} for _ in group.ask(do="prepare", nbytes=nbytes, ways=["ordered"])]  # no idle traffic to subtract
    repeats = max(1, round(options.block_s / on_hosts.turn(groups, "ordered", nothing, 1)["seconds"]))
    return median(on_hosts.turn(groups, "ordered", nothing, repeats)["seconds"] for _ in range(options.rounds))


def measured_network(bed: Any, on_each: int) -> Network:
    """Measure the cost of messages between the hosts' instances at once, and inside a host."""
    path = Path(bed.shared) / "network.json"
    simulator = [
        sys.executable,
        "-m",
        "collectives.simulation",
        "measure",
        "--network",
        str(path),
        "--output",
        str(path),
    ]
    Network().write(path)
    limits = {"check": True, "env": bed.environ, "timeout": 120}
    subprocess.run(bed.command("h0", *simulator, "--over", "memory", "--local"), **limits)
    poprun = on_hosts.hosts_launch.poprun_command(bed, on_each)
    subprocess.run(bed.command("h0", *poprun, *simulator, "--over", "mpi"), **limits)
    return replace(Network.read(path), burst_bytes=BURST_BYTES)


def simulated_s(hosts: int, on_each: int, nbytes: int, network: Network) -> float:
    """Return the steady time of the comparison of calls and the plan, in the transport's pieces."""
    places = np.repeat(np.arange(hosts), on_each)
    link = Places(tuple(places.tolist()), _sizes_between_hosts(places.size, on_each))
    rounds = relays(link.hosts)
    if nbytes <= link.sizes.inline_bytes:
        return steady_s([of_comparison(places, rounds, HEADER_BYTES + nbytes)], network)
    leaving = [each for each in rounds if link.hosts[each[0].source] != link.hosts[each[0].to]]
    pairs = {(source, to) for source, to, _ in leaving[0]} if len(leaving) == 1 else set()
    planner = Planner(link, pairs)
    planned = planner.planned(Reduction("sum", np.dtype(np.float32)), (1,) * places.size, nbytes // 4, False)
    told = [each for each in rounds if planned.opens_in < 0 or each not in leaving]  # others travel with the plan
    reduction = of_plan(planned.plan, nbytes // 4, Width(4, 4), len(planned.programs))
    return steady_s([*[of_comparison(places, told, HEADER_BYTES)] * bool(told), reduction], network)


class Places(Link):
    """A link that knows the hosts of ranks and sends nothing."""

    def __init__(self, hosts: tuple[int, ...], sizes: Sizes) -> None:
        self.rank, self.size = 0, len(hosts)
        self.hosts, self.sizes = hosts, sizes
        self.nearby = hosts if len(set(hosts)) < len(hosts) else ()

    def send(self, data: np.ndarray, to: int, lane: int) -> Transfer:
        """Raise NotImplementedError."""
        raise NotImplementedError

    def receive(self, into: np.ndarray, source: int, lane: int) -> Transfer:
        """Raise NotImplementedError."""
        raise NotImplementedError


if __name__ == "__main__":
    main()
