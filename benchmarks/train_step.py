"""Training steps: ours, one process alone, and other libraries.

Each instance has one replica and one core. The processes of all ways are alive at the same time; a coordinator gives
them turns, and the others sleep. All ways begin with the same variables, read the same batches and must agree on the
losses. Usage:

    python benchmarks/train_step.py [--instances 2] [--batch-size 64] [--rounds 7] [--json PATH]
        [--against torch --torch-python PATH] [--against tensorflow --tensorflow-python PATH]
        [--against horovod --horovod-python PATH] [--strategy popdist|horovod|multi-worker]

Columns: "ours" makes steps on batches that are on the device, as all others except "dataset", which is ours with the
data set's own gathering and prefetching; "alone" is one compiled program of gradients and update in each process,
without communication; "ddp" is torch's DistributedDataParallel over gloo, if torch is installed; "tf" is TensorFlow's
MultiWorkerMirroredStrategy with RING over gRPC; "hvd" is torch with Horovod's DistributedOptimizer under mpirun, with
the default settings of Horovod and Open MPI; "tuned" is the same with the two settings that help most here; "over hvd"
is ours over Horovod, `IPUHorovodStrategy` under poprun, if this interpreter has both.

Ours is `PopDistStrategy` under poprun, or `IPUMultiWorkerStrategy` over gRPC against TensorFlow.

A thread of Horovod never sleeps, so the processes of its ways are stopped between their turns.
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
SAME_LOSS = 1e-3  # relative: after a few steps the ways differ by rounding only


@dataclass(frozen=True)
class Peer:
    """Another library that trains the same models.

    Attributes:
        way: Name of its turns.
        library: Library that it needs.
        program: Program of its workers.
        title: Title of its column.
        environ: Additional variables of its workers.
    """

    way: str
    library: str
    program: str
    title: str
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Contest:
    """The common settings of the ways that take turns with one model.

    Attributes:
        coordinator: Coordinator of the turns.
        model: Name of the model.
        options: Options of the command line.
        cpus: Core of each instance.
        folder: Folder for files that the processes share.
    """

    coordinator: Coordinator
    model: str
    options: argparse.Namespace
    cpus: tuple[str, ...]
    folder: str

    @property
    def words(self) -> list[str]:
        """The common arguments of all programs."""
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
        raise SystemExit("failed checks: " + ", ".join(wrong))


def read_options() -> argparse.Namespace:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--instances", type=int, default=2, metavar="N", help="instances with one replica each (%(default)s)")
    add("--models", nargs="+", choices=training_task.MODELS, default=training_task.MODELS, help="models to train (all)")
    add("--batch-size", type=int, default=64, metavar="N", help="rows per replica (%(default)s)")
    add("--rounds", type=int, default=7, metavar="N", help="turns of each way (%(default)s)")
    add("--steps", type=int, default=50, metavar="N", help="steps of a turn (%(default)s)")
    add("--against", action="append", choices=tuple(MODULES), help="another library; may be repeated (torch)")
    add("--strategy", choices=tuple(STARTS), help="our strategy (multi-worker against tensorflow, otherwise popdist)")
    for library in MODULES:
        add(f"--{library}-python", metavar="PATH", help=f"Python with {library} and NumPy (this interpreter)")
    add("--limit-s", type=float, default=300.0, metavar="SECONDS", help="time limit of an answer (%(default)s)")
    options = parser.parse_args()
    options.against = options.against or ["torch"]
    options.strategy = options.strategy or ("multi-worker" if "tensorflow" in options.against else "popdist")
    return options


def find_pythons(options: argparse.Namespace) -> dict[str, str]:
    """Return the interpreter for each library; leave torch out if it is not installed and was not requested."""
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
    """Return whether our strategy over Horovod has a column besides ours."""
    return "horovod" in options.against and options.strategy != "horovod"


def peers_of(libraries: Collection[str]) -> Iterator[Peer]:
    return (peer for peer in PEERS if peer.library in libraries)


def measure(
    model: str, options: argparse.Namespace, cpus: tuple[str, ...], pythons: Mapping[str, str]
) -> dict[str, Any]:
    """Measure all ways in turns, with one model."""
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
    """Start ours under poprun."""
    return contest.start("popdist", [poprun_command("popdist", contest)], environment())


def start_horovod(contest: Contest) -> Group:
    """Start ours over Horovod, under poprun."""
    return contest.start("over hvd", [poprun_command("horovod", contest)], environment(), is_restless=True)


def poprun_command(kind: str, contest: Contest) -> list[str]:
    """Return the command of our program under poprun, which pins the instances."""
    count = str(len(contest.cpus))
    poprun = [sys.executable, "-m", "poprun", "--num-instances", count, "--num-replicas", count]
    return [*poprun, *jax_program(kind, contest)]


def start_multi_worker(contest: Contest) -> Group:
    """Start ours without a launcher, with TF_CONFIG."""
    program = jax_program("multi-worker", contest)
    told = told_tf_config(contest.cpus)
    commands = [pinned_command(cpu, [*knows, *program]) for cpu, knows in zip(contest.cpus, told, strict=True)]
    return contest.start("ours", commands, with_thread_pool(contest))


def start_alone(contest: Contest) -> Group:
    """Start processes without communication, one for each instance."""
    program, count = jax_program("alone", contest), str(len(contest.cpus))
    commands = [pinned_command(cpu, [*program, str(rank), count]) for rank, cpu in enumerate(contest.cpus)]
    return contest.start("alone", commands, with_thread_pool(contest))


STARTS = {"popdist": start_popdist, "horovod": start_horovod, "multi-worker": start_multi_worker}


def jax_program(kind: str, contest: Contest) -> list[str]:
    return [sys.executable, str(HERE / "training_jax.py"), kind, *contest.words]


def with_thread_pool(contest: Contest) -> dict[str, str]:
    """Return the environment that poprun would give, where the replicas determine the size of XLA's thread pool."""
    return as_strategies_do(environment(), len(contest.cpus))


def start_peer(contest: Contest, peer: Peer, python: str) -> Group:
    """Start workers of another library; torch's meet at a file, TensorFlow's read TF_CONFIG."""
    program, count = [python, str(HERE / peer.program), *contest.words], str(len(contest.cpus))
    meeting = [f"{contest.folder}/gloo"] if peer.way == "ddp" else []
    commands = [
        pinned_command(cpu, [*knows, *program, str(rank), count, *meeting])
        for rank, (cpu, knows) in enumerate(zip(contest.cpus, told_tf_config(contest.cpus), strict=True))
    ]
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
    return contest.start(peer.way, commands, environment(**quiet))


def start_horovod_peer(contest: Contest, peer: Peer, python: str) -> Group:
    """Start workers of Horovod by one mpirun, which connects them."""
    program = [python, str(HERE / peer.program), *contest.words]
    command = mpirun_command(contest.cpus, program, python)
    return contest.start(peer.way, [command], environment(**peer.environ), is_restless=True)


def told_tf_config(cpus: tuple[str, ...]) -> list[list[str]]:
    """Return for each worker the words before its command that set TF_CONFIG."""
    addresses = free_addresses(len(cpus))
    return [["env", f"TF_CONFIG={tf_config(addresses, rank)}"] for rank in range(len(cpus))]


def take_turn(group: Group, name: str, steps: int) -> tuple[float, list[float]]:
    """Return milliseconds per step of the slowest rank, and the loss of each step as a mean over ranks."""
    answers = group.ask(do=REQUESTS[name], steps=steps)
    losses = [mean(of_ranks) for of_ranks in zip(*(answer["losses"] for answer in answers), strict=True)]
    return 1e3 * max(answer["seconds"] for answer in answers) / steps, losses


def check(losses: dict[str, list[float]], fingerprints: list[list[str]]) -> dict[str, bool]:
    """Return for each check whether it holds; together they show that all ways did the same work."""
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
    """Return the ways by the titles of their columns."""
    titles = {way: way for way in ("ours", "dataset", "alone")}
    if has_own_horovod_column(options):
        titles["over hvd"] = "over_hvd"
    return titles | {peer.title: peer.way for peer in peers_of(options.against)}


def ratio_columns(options: argparse.Namespace) -> dict[str, str]:
    """Return the names of ratios by the titles of their columns."""
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
