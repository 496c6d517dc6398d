"""How long a training step takes: ours, what one process computes alone, and other libraries.

One replica per instance and one core per instance. The processes of all ways live at the same time; one process tells
them whose turn it is, and the others sleep. All ways begin with the same variables, read the same batches and have to
agree on the losses. Usage:

    python benchmarks/train_step.py [--instances 2] [--batch-size 64] [--rounds 7] [--json PATH]
        [--against torch --torch-python PATH] [--against tensorflow --tensorflow-python PATH]
        [--strategy popdist|multi-worker]

The columns: "ours" steps on batches that are on the device already, as do all the others but "dataset", which is ours
with the data set's own gathering and prefetching; "alone" is one compiled program of gradients and update in each
process, without any communication; "ddp" is torch's DistributedDataParallel over gloo, where torch is installed; "tf"
is TensorFlow's MultiWorkerMirroredStrategy with RING over gRPC.

Ours is `PopDistStrategy` under poprun, or `IPUMultiWorkerStrategy` over gRPC, with which TensorFlow is compared.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import training_task
from cluster import free_addresses, tf_config
from control import Coordinator, Group
from timing import OtherLoad, describe_machine, environment, medians, one_core_each, pinned_command

from popdist.environments import thread_pool_setting

HERE = Path(__file__).parent
REQUESTS = {"ours": "placed", "dataset": "dataset", "alone": "alone", "ddp": "ddp", "tensorflow": "tensorflow"}
SETTINGS = ("instances", "strategy", "batch_size", "rounds", "steps")
SAME_LOSS = 1e-3  # relative: after a few steps only rounding sets the ways apart


@dataclass(frozen=True)
class Peer:
    """Another library that trains the same models.

    Attributes:
        way: what its turns are called.
        program: of its workers.
        title: of its column.
    """

    way: str
    program: str
    title: str


PEERS = {
    "torch": Peer("ddp", "training_torch.py", "ddp"),
    "tensorflow": Peer("tensorflow", "training_tensorflow.py", "tf"),
}


def main() -> None:
    options = read_options()
    machine = describe_machine()
    pythons = find_pythons(options)
    cpus = one_core_each(options.instances)
    print_header(options)
    load = OtherLoad()
    rows = []
    for model in options.models:
        rows.append(measure(model, options, cpus, pythons))
        print_row(rows[-1], options.against)
    load.warn()
    if options.json:
        settings = {name: getattr(options, name) for name in SETTINGS}
        mechanism = options.strategy_mechanism or "auto"
        result = {"machine": machine, "other_load": load.share(), **settings, "mechanism": mechanism, "rows": rows}
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")
    wrong = [f"{row['model']}: {name}" for row in rows for name, holds in row["checks"].items() if not holds]
    if wrong:
        raise SystemExit("these do not hold: " + ", ".join(wrong))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--instances", type=int, default=2, metavar="N", help="with one replica each (%(default)s)")
    add("--models", nargs="+", choices=training_task.MODELS, default=training_task.MODELS)
    add("--batch-size", type=int, default=64, metavar="N", help="per replica (%(default)s)")
    add("--rounds", type=int, default=7, metavar="N", help="turns of each way (%(default)s)")
    add("--steps", type=int, default=50, metavar="N", help="in each turn (%(default)s)")
    add("--against", action="append", choices=tuple(PEERS), help="a library; may be repeated (default: torch)")
    add("--strategy", choices=("popdist", "multi-worker"), help="of ours (multi-worker against tensorflow, or popdist)")
    add("--strategy-mechanism", choices=("window", "ring"), help="for popdist (default: what it chooses)")
    for library in PEERS:
        add(f"--{library}-python", metavar="PATH", help=f"has {library} and NumPy (default: this interpreter)")
    add("--limit-s", type=float, default=300.0, metavar="SECONDS", help="for any answer (%(default)s)")
    add("--json", metavar="PATH", help="write the figures to this file")
    options = parser.parse_args()
    options.against = options.against or ["torch"]
    options.strategy = options.strategy or ("multi-worker" if "tensorflow" in options.against else "popdist")
    if options.strategy_mechanism and options.strategy != "popdist":
        parser.error("--strategy-mechanism is for --strategy popdist; the other one has a ring only")
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
            raise SystemExit(f"{python} cannot import {library}; name an interpreter that can: --{library}-python PATH")
    return pythons


def can_import(library: str, python: str) -> bool:
    return subprocess.run([python, "-c", f"import {library}"], capture_output=True, check=False).returncode == 0


def measure(
    model: str, options: argparse.Namespace, cpus: tuple[str, ...], pythons: Mapping[str, str]
) -> dict[str, Any]:
    """All ways take turns with one model."""
    with (
        tempfile.TemporaryDirectory(prefix="train-step-") as folder,
        Coordinator(folder, options.limit_s) as coordinator,
    ):
        start_ours = {"popdist": start_popdist, "multi-worker": start_multi_worker}[options.strategy]
        ours = start_ours(coordinator, model, options, cpus)
        groups = {"ours": ours, "dataset": ours, "alone": start_alone(coordinator, model, options, cpus)}
        for library, python in pythons.items():
            groups[PEERS[library].way] = start_peer(coordinator, PEERS[library], model, options, cpus, python, folder)
        losses = {
            name: take_turn(groups[name], name, training_task.WARM_UP_STEPS)[1] for name in groups if name != "dataset"
        }
        take_turn(ours, "dataset", options.steps)
        times: dict[str, list[float]] = {name: [] for name in groups}
        for _ in range(options.rounds):
            for name, group in groups.items():
                times[name].append(take_turn(group, name, options.steps)[0])
        fingerprints = ours.ask(do="fingerprint")
    return make_row(model, times, check(losses, fingerprints))


def start_popdist(coordinator: Coordinator, model: str, options: argparse.Namespace, cpus: tuple[str, ...]) -> Group:
    """Ours under poprun, which pins the instances."""
    count = str(len(cpus))
    program = jax_program("popdist", coordinator, model, options)
    poprun = [sys.executable, "-m", "poprun", "--num-instances", count, "--num-replicas", count]
    mechanism = {"TRAIN_STEP_MECHANISM": options.strategy_mechanism} if options.strategy_mechanism else {}
    return coordinator.start("ours", len(cpus), [[*poprun, *program]], environment(**mechanism))


def start_multi_worker(
    coordinator: Coordinator, model: str, options: argparse.Namespace, cpus: tuple[str, ...]
) -> Group:
    """Ours without a launcher: TF_CONFIG says who is who."""
    program = jax_program("multi-worker", coordinator, model, options)
    commands = [pinned_command(cpu, [*knows, *program]) for cpu, knows in zip(cpus, told_tf_config(cpus), strict=True)]
    environ = environment()
    return coordinator.start("ours", len(cpus), commands, environ | thread_pool_setting(environ, len(cpus)))


def start_alone(coordinator: Coordinator, model: str, options: argparse.Namespace, cpus: tuple[str, ...]) -> Group:
    program = jax_program("alone", coordinator, model, options)
    commands = [pinned_command(cpu, [*program, str(rank), str(len(cpus))]) for rank, cpu in enumerate(cpus)]
    environ = environment()
    return coordinator.start("alone", len(cpus), commands, environ | thread_pool_setting(environ, len(cpus)))


def jax_program(kind: str, coordinator: Coordinator, model: str, options: argparse.Namespace) -> list[str]:
    return [sys.executable, str(HERE / "training_jax.py"), kind, coordinator.path, model, str(options.batch_size)]


def start_peer(
    coordinator: Coordinator,
    peer: Peer,
    model: str,
    options: argparse.Namespace,
    cpus: tuple[str, ...],
    python: str,
    folder: str,
) -> Group:
    """Workers of another library; those of torch meet at a file, those of TensorFlow read TF_CONFIG."""
    program = [python, str(HERE / peer.program), coordinator.path, model, str(options.batch_size)]
    meeting = [f"{folder}/gloo"] if peer.way == "ddp" else []
    commands = [
        pinned_command(cpu, [*knows, *program, str(rank), str(len(cpus)), *meeting])
        for rank, (cpu, knows) in enumerate(zip(cpus, told_tf_config(cpus), strict=True))
    ]
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
    return coordinator.start(peer.way, len(cpus), commands, environment(**quiet))


def told_tf_config(cpus: tuple[str, ...]) -> list[list[str]]:
    """For each worker, the words in front of a command that set its TF_CONFIG."""
    addresses = free_addresses(len(cpus))
    return [["env", f"TF_CONFIG={tf_config(addresses, rank)}"] for rank in range(len(cpus))]


def take_turn(group: Group, name: str, steps: int) -> tuple[float, list[float]]:
    """Milliseconds per step of the slowest rank, and the loss of each step, averaged over the ranks."""
    answers = group.ask(do=REQUESTS[name], steps=steps)
    losses = [mean(of_ranks) for of_ranks in zip(*(answer["losses"] for answer in answers), strict=True)]
    return 1e3 * max(answer["seconds"] for answer in answers) / steps, losses


def check(losses: dict[str, list[float]], fingerprints: list[str]) -> dict[str, bool]:
    """Whether all ways did the same work."""
    checks = {
        "instances have the same variables": len(set(fingerprints)) == 1,
        "alone begins with the same loss": math.isclose(losses["alone"][0], losses["ours"][0], rel_tol=SAME_LOSS),
    }
    for way in losses.keys() & {peer.way for peer in PEERS.values()}:
        pairs = zip(losses[way], losses["ours"], strict=True)
        checks[f"{way} has the same losses"] = all(math.isclose(*pair, rel_tol=SAME_LOSS) for pair in pairs)
    return checks


def make_row(model: str, times: dict[str, list[float]], checks: dict[str, bool]) -> dict[str, Any]:
    ms = medians(times)
    peers = {f"{peer.way}_over_ours": ms[peer.way] / ms["ours"] for peer in PEERS.values() if peer.way in ms}
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
    peers = [PEERS[library].title for library in options.against]
    titles = "".join(f"{title:>10}" for title in ["ours", "dataset", "alone", *peers])
    ratios = "".join(f"{f'{title}/ours':>10}" for title in peers)
    print(f"{'model':<6}{titles}{'ours/alone':>13}{'dataset/alone':>15}{ratios}", flush=True)


def print_row(row: dict[str, Any], against: list[str]) -> None:
    ms = row["ms_per_step"]
    peers = [PEERS[library].way for library in against]
    cells = "".join(f"{ms[way]:>10.2f}" if way in ms else f"{'-':>10}" for way in ["ours", "dataset", "alone", *peers])
    ratios = "".join(f"{row[f'{way}_over_ours']:>10.2f}" if way in ms else f"{'-':>10}" for way in peers)
    print(
        f"{row['model']:<6}{cells}{row['ours_over_alone']:>13.3f}{row['dataset_over_alone']:>15.3f}{ratios}", flush=True
    )


if __name__ == "__main__":
    main()
