"""How long a training step takes: ours, what one process computes alone, and other libraries.

One replica per instance and one core per instance. The processes of all ways live at the same time; one process tells
them whose turn it is, and the others sleep. All ways begin with the same variables, read the same batches and have to
agree on the losses. Usage:

    python benchmarks/train_step.py [--instances 2] [--batch-size 64] [--rounds 7] [--json PATH]
        [--against torch --torch-python PATH] [--against tensorflow --tensorflow-python PATH]
        [--against horovod --horovod-python PATH] [--strategy popdist|horovod|multi-worker]

The columns: "ours" steps on batches that are on the device already, as do all the others but "dataset", which is ours
with the data set's own gathering and prefetching; "alone" is one compiled program of gradients and update in each
process, without any communication; "ddp" is torch's DistributedDataParallel over gloo, where torch is installed; "tf"
is TensorFlow's MultiWorkerMirroredStrategy with RING over gRPC; "hvd" is torch with Horovod's DistributedOptimizer
under mpirun, with the settings that Horovod and Open MPI have by themselves, and "tuned" the same with the two that
help it most here; "over hvd" is ours over Horovod, `IPUHorovodStrategy` under poprun, where this interpreter has both.

Ours is `PopDistStrategy` under poprun, or `IPUMultiWorkerStrategy` over gRPC, with which TensorFlow is compared.

A thread of Horovod never sleeps, so the processes of its ways are stopped while it is not their turn.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import training_task
from cluster import free_addresses, tf_config
from control import Coordinator, Group
from timing import (
    HOROVOD_SCRIPT,
    TUNED,
    Machine,
    as_strategies_do,
    command_line,
    environment,
    medians,
    mpirun_command,
    one_core_each,
    pinned_command,
)

HERE = Path(__file__).parent
REQUESTS = {
    "ours": "placed",
    "dataset": "dataset",
    "alone": "alone",
    "over_hvd": "placed",
    "ddp": "ddp",
    "tensorflow": "tensorflow",
    "hvd": "hvd",
    "hvd_tuned": "hvd",
}
MODULES = {"torch": "torch", "tensorflow": "tensorflow", "horovod": "horovod.torch"}
SETTINGS = ("instances", "strategy", "batch_size", "rounds", "steps")
SAME_LOSS = 1e-3  # relative: after a few steps only rounding sets the ways apart


@dataclass(frozen=True)
class Peer:
    """Another library that trains the same models.

    Attributes:
        way: what its turns are called.
        library: what it needs.
        program: of its workers.
        title: of its column.
        environ: what it is told besides.
    """

    way: str
    library: str
    program: str
    title: str
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Contest:
    """What the ways that take turns with one model have in common.

    Attributes:
        coordinator: tells them whose turn it is.
        model: its name.
        options: of the command line.
        cpus: one for each instance.
        folder: for what the processes share.
    """

    coordinator: Coordinator
    model: str
    options: argparse.Namespace
    cpus: tuple[str, ...]
    folder: str

    @property
    def words(self) -> list[str]:
        """What every program is told."""
        return [self.coordinator.path, self.model, str(self.options.batch_size)]

    def start(
        self, name: str, commands: Sequence[list[str]], environ: dict[str, str], is_restless: bool = False
    ) -> Group:
        """Start the processes of one way."""
        return self.coordinator.start(name, len(self.cpus), commands, environ, is_restless)


PEERS = (
    Peer("ddp", "torch", "training_torch.py", "ddp"),
    Peer("tensorflow", "tensorflow", "training_tensorflow.py", "tf"),
    Peer("hvd", "horovod", "training_torch.py", "hvd"),
    Peer("hvd_tuned", "horovod", "training_torch.py", "tuned", TUNED),
)


def main() -> None:
    options = read_options()
    machine = Machine()
    pythons = find_pythons(options)
    cpus = one_core_each(options.instances)
    print_header(options)
    rows = []
    for model in options.models:
        rows.append(measure(model, options, cpus, pythons))
        print_row(rows[-1], options)
    machine.write(options, SETTINGS, rows=rows)
    wrong = [f"{row['model']}: {name}" for row in rows for name, holds in row["checks"].items() if not holds]
    if wrong:
        raise SystemExit("these do not hold: " + ", ".join(wrong))


def read_options() -> argparse.Namespace:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--instances", type=int, default=2, metavar="N", help="with one replica each (%(default)s)")
    add("--models", nargs="+", choices=training_task.MODELS, default=training_task.MODELS)
    add("--batch-size", type=int, default=64, metavar="N", help="per replica (%(default)s)")
    add("--rounds", type=int, default=7, metavar="N", help="turns of each way (%(default)s)")
    add("--steps", type=int, default=50, metavar="N", help="in each turn (%(default)s)")
    add("--against", action="append", choices=tuple(MODULES), help="a library; may be repeated (default: torch)")
    add("--strategy", choices=tuple(STARTS), help="of ours (multi-worker against tensorflow, or popdist)")
    for library in MODULES:
        add(f"--{library}-python", metavar="PATH", help=f"has {library} and NumPy (default: this interpreter)")
    add("--limit-s", type=float, default=300.0, metavar="SECONDS", help="for any answer (%(default)s)")
    options = parser.parse_args()
    options.against = options.against or ["torch"]
    options.strategy = options.strategy or ("multi-worker" if "tensorflow" in options.against else "popdist")
    return options


def find_pythons(options: argparse.Namespace) -> dict[str, str]:
    """The interpreter for each library; torch is left out where it is not installed, unless it was asked for."""
    pythons = {}
    for library in options.against:
        wanted = getattr(options, f"{library}_python")
        python = wanted or sys.executable
        if can_import(library, python):
            pythons[library] = python
        elif wanted or library != "torch":
            raise SystemExit(
                f"{python} cannot import {library}; name an interpreter that can: --{library}-python PATH"
                + (f", or build it with: {HOROVOD_SCRIPT}" if library == "horovod" else "")
            )
    return pythons


@cache
def can_import(library: str, python: str) -> bool:
    command = [python, "-c", f"import {MODULES[library]}"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def has_own_horovod_column(options: argparse.Namespace) -> bool:
    """Whether our strategy over Horovod is compared, and not ours anyway."""
    return "horovod" in options.against and options.strategy != "horovod"


def peers_of(libraries: Collection[str]) -> Iterator[Peer]:
    return (peer for peer in PEERS if peer.library in libraries)


def measure(
    model: str, options: argparse.Namespace, cpus: tuple[str, ...], pythons: Mapping[str, str]
) -> dict[str, Any]:
    """All ways take turns with one model."""
    with (
        tempfile.TemporaryDirectory(prefix="train-step-") as folder,
        Coordinator(folder, options.limit_s) as coordinator,
    ):
        contest = Contest(coordinator, model, options, cpus, folder)
        ours = STARTS[options.strategy](contest)
        groups = {"ours": ours, "dataset": ours, "alone": start_alone(contest)}
        if has_own_horovod_column(options) and can_import("horovod", sys.executable):
            groups["over_hvd"] = start_horovod(contest)
        for peer in peers_of(pythons):
            start = start_horovod_peer if peer.library == "horovod" else start_peer
            groups[peer.way] = start(contest, peer, pythons[peer.library])
        losses = {
            name: take_turn(groups[name], name, training_task.WARM_UP_STEPS)[1] for name in groups if name != "dataset"
        }
        take_turn(ours, "dataset", options.steps)
        times: dict[str, list[float]] = {name: [] for name in groups}
        for _ in range(options.rounds):
            for name, group in groups.items():
                times[name].append(take_turn(group, name, options.steps)[0])
        fingerprints = [groups[way].ask(do="fingerprint") for way in ("ours", "over_hvd") if way in groups]
    return make_row(model, times, check(losses, fingerprints))


def start_popdist(contest: Contest) -> Group:
    """Ours under poprun."""
    return contest.start("popdist", [poprun_command("popdist", contest)], environment())


def start_horovod(contest: Contest) -> Group:
    """Ours over Horovod, under poprun."""
    return contest.start("over hvd", [poprun_command("horovod", contest)], environment(), is_restless=True)


def poprun_command(kind: str, contest: Contest) -> list[str]:
    """A program of ours under poprun, which pins the instances."""
    count = str(len(contest.cpus))
    poprun = [sys.executable, "-m", "poprun", "--num-instances", count, "--num-replicas", count]
    return [*poprun, *jax_program(kind, contest)]


def start_multi_worker(contest: Contest) -> Group:
    """Ours without a launcher: TF_CONFIG says who is who."""
    program = jax_program("multi-worker", contest)
    told = told_tf_config(contest.cpus)
    commands = [pinned_command(cpu, [*knows, *program]) for cpu, knows in zip(contest.cpus, told, strict=True)]
    return contest.start("ours", commands, with_thread_pool(contest))


def start_alone(contest: Contest) -> Group:
    """What one process computes without any communication, as often as there are instances."""
    program, count = jax_program("alone", contest), str(len(contest.cpus))
    commands = [pinned_command(cpu, [*program, str(rank), count]) for rank, cpu in enumerate(contest.cpus)]
    return contest.start("alone", commands, with_thread_pool(contest))


STARTS = {"popdist": start_popdist, "horovod": start_horovod, "multi-worker": start_multi_worker}


def jax_program(kind: str, contest: Contest) -> list[str]:
    return [sys.executable, str(HERE / "training_jax.py"), kind, *contest.words]


def with_thread_pool(contest: Contest) -> dict[str, str]:
    """The environment that poprun would give: as many replicas decide the size of XLA's thread pool."""
    return as_strategies_do(environment(), len(contest.cpus))


def start_peer(contest: Contest, peer: Peer, python: str) -> Group:
    """Workers of another library; those of torch meet at a file, those of TensorFlow read TF_CONFIG."""
    program, count = [python, str(HERE / peer.program), *contest.words], str(len(contest.cpus))
    meeting = [f"{contest.folder}/gloo"] if peer.way == "ddp" else []
    commands = [
        pinned_command(cpu, [*knows, *program, str(rank), count, *meeting])
        for rank, (cpu, knows) in enumerate(zip(contest.cpus, told_tf_config(contest.cpus), strict=True))
    ]
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
    return contest.start(peer.way, commands, environment(**quiet))


def start_horovod_peer(contest: Contest, peer: Peer, python: str) -> Group:
    """Workers of Horovod: one mpirun starts and connects them."""
    program = [python, str(HERE / peer.program), *contest.words]
    command = mpirun_command(contest.cpus, program, python)
    return contest.start(peer.way, [command], environment(**peer.environ), is_restless=True)


def told_tf_config(cpus: tuple[str, ...]) -> list[list[str]]:
    """For each worker, the words in front of a command that set its TF_CONFIG."""
    addresses = free_addresses(len(cpus))
    return [["env", f"TF_CONFIG={tf_config(addresses, rank)}"] for rank in range(len(cpus))]


def take_turn(group: Group, name: str, steps: int) -> tuple[float, list[float]]:
    """Milliseconds per step of the slowest rank, and the loss of each step, averaged over the ranks."""
    answers = group.ask(do=REQUESTS[name], steps=steps)
    losses = [mean(of_ranks) for of_ranks in zip(*(answer["losses"] for answer in answers), strict=True)]
    return 1e3 * max(answer["seconds"] for answer in answers) / steps, losses


def check(losses: dict[str, list[float]], fingerprints: list[list[str]]) -> dict[str, bool]:
    """Whether all ways did the same work."""
    checks = {
        "instances have the same variables": all(len(set(of_ranks)) == 1 for of_ranks in fingerprints),
        "alone begins with the same loss": math.isclose(losses["alone"][0], losses["ours"][0], rel_tol=SAME_LOSS),
    }
    for way in losses.keys() - {"ours", "alone"}:
        pairs = zip(losses[way], losses["ours"], strict=True)
        checks[f"{way} has the same losses"] = all(math.isclose(*pair, rel_tol=SAME_LOSS) for pair in pairs)
    return checks


def make_row(model: str, times: dict[str, list[float]], checks: dict[str, bool]) -> dict[str, Any]:
    ms = medians(times)
    pairs = [(peer.way, "ours") for peer in PEERS] + [("over_hvd", "hvd"), ("over_hvd", "hvd_tuned")]
    peers = {f"{way}_over_{other}": ms[way] / ms[other] for way, other in pairs if {way, other} <= ms.keys()}
    return {
        "model": model,
        "ms_per_step": ms,
        "ours_over_alone": ms["ours"] / ms["alone"],
        "dataset_over_alone": ms["dataset"] / ms["alone"],
        "ddp_over_ours": None,
        **peers,
        "rounds_ms": times,
        "checks": checks,
    }


def print_header(options: argparse.Namespace) -> None:
    print(f"{options.instances} instances, one core and one replica of {options.batch_size} each; ms per step, medians")
    titles = [*time_columns(options), *ratio_columns(options)]
    print(f"{'model':<6}{''.join(f'{title:>{width(title)}}' for title in titles)}", flush=True)


def print_row(row: dict[str, Any], options: argparse.Namespace) -> None:
    cells = [cell(title, row["ms_per_step"].get(way), 2) for title, way in time_columns(options).items()]
    cells += [cell(title, row.get(ratio), 3) for title, ratio in ratio_columns(options).items()]
    print(f"{row['model']:<6}{''.join(cells)}", flush=True)


def time_columns(options: argparse.Namespace) -> dict[str, str]:
    """Titles, and the ways below them."""
    titles = {way: way for way in ("ours", "dataset", "alone")}
    if has_own_horovod_column(options):
        titles["over hvd"] = "over_hvd"
    return titles | {peer.title: peer.way for peer in peers_of(options.against)}


def ratio_columns(options: argparse.Namespace) -> dict[str, str]:
    """Titles, and what the ratios below them are called in a row."""
    titles = {f"{way}/alone": f"{way}_over_alone" for way in ("ours", "dataset")}
    titles |= {f"{peer.title}/ours": f"{peer.way}_over_ours" for peer in peers_of(options.against)}
    if has_own_horovod_column(options):
        titles |= {
            f"over hvd/{title}": f"over_hvd_over_{way}" for title, way in (("hvd", "hvd"), ("tuned", "hvd_tuned"))
        }
    return titles


def cell(title: str, value: float | None, digits: int) -> str:
    return f"{'-' if value is None else f'{value:.{digits}f}':>{width(title)}}"


def width(title: str) -> int:
    return max(10, len(title) + 2)


if __name__ == "__main__":
    main()
