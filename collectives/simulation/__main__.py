"""The command `poprun simulate`: the costs of an all-reduce on simulated hosts.

Its subcommands `all-reduce`, `plot` and `measure` describe their options with `--help`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from collectives.plans.network import Network
from collectives.simulation.comparing import SimulatedJob, compared
from collectives.simulation.measuring import measured
from collectives.simulation.plotting import check_matplotlib, plot

_UNITS = {"K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit status: 1 if the output cannot be written (disk full), 141 if its reader is gone, as with `| true`.
    """
    try:
        try:
            return _run(arguments)
        finally:
            print(end="", flush=True)  # flushes --help as well; at exit Python would print an error as a traceback
    except BrokenPipeError:
        _drop_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        _drop_output()
        print(f"poprun simulate: standard output cannot be written: {error.strerror}", file=sys.stderr)
        return 1


def _drop_output() -> None:
    """Redirect standard output, so that Python's last flush succeeds.

    See https://docs.python.org/3/library/signal.html#note-on-sigpipe.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: Sequence[str] | None) -> int:
    options = command_line_parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], str] = options.run
    try:
        text = run(options)
    except (ValueError, OSError) as error:
        print(f"poprun simulate: {error}", file=sys.stderr)
        return 2
    print(text)
    return 0


def bytes_of(text: str) -> int:
    """Parse a size: `100M` is 10^8 bytes, `64KiB` or `64Ki` is 65,536.

    Raises:
        ValueError: The text is not a size.
    """
    upper = text.upper().removesuffix("B")
    number = upper.rstrip("KMGI")
    unit = upper[len(number) :]
    if unit and unit not in _UNITS:
        raise ValueError(f"{text!r} is no size; write 65536, 100M or 64KiB")
    return int(float(number) * _UNITS.get(unit, 1))


def command_line_parser() -> argparse.ArgumentParser:
    """Return the parser of the words after `poprun simulate`."""
    parser = argparse.ArgumentParser(
        prog="poprun simulate", description="Simulate an all-reduce on any number of hosts, and measure its costs."
    )
    commands = parser.add_subparsers(required=True)
    job = argparse.ArgumentParser(add_help=False)
    job.add_argument("--instances-per-host", type=int, default=1, help="number of instances of each host")
    job.add_argument("--replicas-per-instance", type=int, default=1, help="number of replicas of each instance")
    job.add_argument("--size", type=bytes_of, default=bytes_of("100M"), help="size of the array: 100M, 64KiB")
    job.add_argument("--network", type=Path, help="file of costs, see `measure`; default: 25 Gbit/s and 10 us")
    reduction = commands.add_parser("all-reduce", parents=[job], help="time, bytes and critical path of each way")
    reduction.add_argument("--hosts", type=int, required=True, help="number of hosts")
    reduction.set_defaults(run=_all_reduce)
    curves = commands.add_parser(
        "plot", parents=[job], help="times over numbers of hosts, as PNG and SVG; needs matplotlib"
    )
    curves.add_argument("--most-hosts", type=int, default=4096, help="largest number of hosts")
    curves.add_argument("--output", type=Path, required=True, help="file name without .png and .svg")
    curves.set_defaults(run=_plot)
    measure = commands.add_parser("measure", help="measure the costs of messages and sums here, into a file")
    measure.add_argument(
        "--over", choices=("loopback", "grpc", "mpi", "memory"), default="loopback", help="what is measured"
    )
    measure.add_argument("--local", action="store_true", help="costs within a host are measured, not between hosts")
    measure.add_argument("--network", type=Path, help="file with the costs that are not measured")
    measure.add_argument("--output", type=Path, required=True, help="file of costs that is written")
    measure.set_defaults(run=_measure)
    return parser


def _network(options: argparse.Namespace) -> Network:
    return Network.read(options.network) if options.network else Network()


def _job(options: argparse.Namespace, hosts: int) -> SimulatedJob:
    return SimulatedJob(hosts, options.instances_per_host, options.replicas_per_instance, options.size)


def _all_reduce(options: argparse.Namespace) -> str:
    network, job = _network(options), _job(options, options.hosts)
    least = job.least_s(network)
    lines = [f"{'':28} {'ms':>10} {'of least':>9} {'MB/link':>9}  critical path, ms"]
    for name, outcome in compared(job, network):
        path = ", ".join(f"{part} {seconds * 1e3:.3g}" for part, seconds in outcome.critical.items() if seconds > 1e-9)
        link = outcome.link_bytes.max() / 1e6
        times = f"{outcome.seconds / least:9.2f}" if least else f"{'':9}"
        lines.append(f"{name:28} {outcome.seconds * 1e3:10.3f} {times} {link:9.3f}  {path}")
    lines.append(f"{'least':28} {least * 1e3:10.3f}")
    return "\n".join(lines)


def _plot(options: argparse.Namespace) -> str:
    network = _network(options)
    counts = [2**power for power in range(1, options.most_hosts.bit_length()) if 2**power <= options.most_hosts]
    if not counts:
        raise ValueError(f"--most-hosts is {options.most_hosts}; a plot begins with 2 hosts")
    check_matplotlib()
    points: dict[str, list[tuple[float, float]]] = {}
    for hosts in counts:
        job = _job(options, hosts)
        points.setdefault("least", []).append((hosts, job.least_s(network) * 1e3))
        for name, outcome in compared(job, network, ("ring", "tree")):
            points.setdefault(", ".join(name.split(", ")[:2]), []).append((hosts, outcome.seconds * 1e3))
    instances = "instance" if options.instances_per_host == 1 else "instances"
    title = f"all-reduce of {options.size / 1e6:g} MB, {options.instances_per_host} {instances} per host"
    return " and ".join(map(str, plot(title, points, options.output)))


def _measure(options: argparse.Namespace) -> str:
    network = measured(_network(options), options.over, options.local)
    if network is None:
        return ""
    network.write(options.output)
    return f"{options.output}: {network}"


if __name__ == "__main__":
    sys.exit(main())
