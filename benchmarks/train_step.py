"""How long a training step takes: ours, what one process computes alone, and torch DistributedDataParallel over gloo.

One replica per instance and one core per instance. The processes of all ways live at the same time; one process tells
them whose turn it is, and the others sleep. All ways begin with the same variables, read the same batches and have to
agree on the losses. Usage:

    python benchmarks/train_step.py [--instances 2] [--batch-size 64] [--rounds 7] [--torch-python PATH] [--json PATH]

The columns: "ours" steps on batches that are on the device already, as do all the others but "dataset", which is ours
with the data set's own gathering and prefetching; "alone" is one compiled program of gradients and update in each
process, without any communication; "ddp" is torch, where it is installed.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import training_task
from control import Coordinator, Group
from timing import OtherLoad, describe_machine, environment, medians, one_core_each, pinned_command

from popdist.environments import thread_pool_setting

HERE = Path(__file__).parent
COLUMNS = {"ours": "ours", "dataset": "dataset", "alone": "alone", "ddp": "ddp"}
REQUESTS = {"ours": "placed", "dataset": "dataset", "alone": "alone", "ddp": "ddp"}
SAME_LOSS = 1e-3  # relative: after a few steps only rounding sets the ways apart


def main() -> None:
    options = read_options()
    machine = describe_machine()
    torch_python = find_torch(options.torch_python)
    cpus = one_core_each(options.instances)
    print_header(options)
    load = OtherLoad()
    rows = []
    for model in options.models:
        rows.append(measure(model, options, cpus, torch_python))
        print_row(rows[-1])
    load.warn()
    if options.json:
        settings = {name: getattr(options, name) for name in ("instances", "batch_size", "rounds", "steps")}
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
    add("--strategy-mechanism", choices=("window", "ring"), help="for ours (default: what it chooses)")
    add("--torch-python", metavar="PATH", help="an interpreter that has torch and NumPy (default: this one)")
    add("--limit-s", type=float, default=300.0, metavar="SECONDS", help="for any answer (%(default)s)")
    add("--json", metavar="PATH", help="write the figures to this file")
    return parser.parse_args()


def find_torch(wanted: str | None) -> str | None:
    """The interpreter for torch, None where there is none."""
    python = wanted or sys.executable
    found = subprocess.run([python, "-c", "import torch"], capture_output=True, check=False).returncode == 0
    if wanted and not found:
        raise SystemExit(f"{wanted} cannot import torch; name another interpreter, or leave --torch-python out")
    return python if found else None


def measure(model: str, options: argparse.Namespace, cpus: tuple[str, ...], torch_python: str | None) -> dict[str, Any]:
    """All ways take turns with one model."""
    with (
        tempfile.TemporaryDirectory(prefix="train-step-") as folder,
        Coordinator(folder, options.limit_s) as coordinator,
    ):
        ours = start_ours(coordinator, model, options)
        groups = {"ours": ours, "dataset": ours, "alone": start_alone(coordinator, model, options, cpus)}
        if torch_python is not None:
            groups["ddp"] = start_ddp(coordinator, model, options, cpus, torch_python, f"{folder}/gloo")
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


def start_ours(coordinator: Coordinator, model: str, options: argparse.Namespace) -> Group:
    """Under poprun, which pins the instances."""
    count = str(options.instances)
    program = [
        sys.executable,
        str(HERE / "training_jax.py"),
        "ours",
        coordinator.path,
        model,
        str(options.batch_size),
    ]
    poprun = [sys.executable, "-m", "poprun", "--num-instances", count, "--num-replicas", count]
    mechanism = {"TRAIN_STEP_MECHANISM": options.strategy_mechanism} if options.strategy_mechanism else {}
    return coordinator.start("ours", options.instances, [[*poprun, *program]], environment(**mechanism))


def start_alone(coordinator: Coordinator, model: str, options: argparse.Namespace, cpus: tuple[str, ...]) -> Group:
    words = [
        sys.executable,
        str(HERE / "training_jax.py"),
        "alone",
        coordinator.path,
        model,
        str(options.batch_size),
    ]
    commands = [pinned_command(cpu, [*words, str(rank), str(options.instances)]) for rank, cpu in enumerate(cpus)]
    environ = environment()
    return coordinator.start("alone", len(cpus), commands, environ | thread_pool_setting(environ, len(cpus)))


def start_ddp(
    coordinator: Coordinator,
    model: str,
    options: argparse.Namespace,
    cpus: tuple[str, ...],
    python: str,
    rendezvous: str,
) -> Group:
    words = [python, str(HERE / "training_torch.py"), coordinator.path, model, str(options.batch_size)]
    commands = [pinned_command(cpu, [*words, str(rank), str(len(cpus)), rendezvous]) for rank, cpu in enumerate(cpus)]
    return coordinator.start("ddp", len(cpus), commands, environment())


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
    if "ddp" in losses:
        pairs = zip(losses["ddp"], losses["ours"], strict=True)
        checks["ddp has the same losses"] = all(math.isclose(*pair, rel_tol=SAME_LOSS) for pair in pairs)
    return checks


def make_row(model: str, times: dict[str, list[float]], checks: dict[str, bool]) -> dict[str, Any]:
    ms = medians(times)
    ratios = {name: ms[name] / ms["alone"] for name in ("ours", "dataset")}
    if "ddp" in ms:
        ratios["ddp"] = ms["ddp"] / ms["ours"]
    return {
        "model": model,
        "ms_per_step": ms,
        "ours_over_alone": ratios["ours"],
        "dataset_over_alone": ratios["dataset"],
        "ddp_over_ours": ratios.get("ddp"),
        "rounds_ms": times,
        "checks": checks,
    }


def print_header(options: argparse.Namespace) -> None:
    print(f"{options.instances} instances, one core and one replica of {options.batch_size} each; ms per step, medians")
    titles = "".join(f"{title:>10}" for title in COLUMNS.values())
    print(f"{'model':<6}{titles}{'ours/alone':>13}{'dataset/alone':>15}{'ddp/ours':>10}", flush=True)


def print_row(row: dict[str, Any]) -> None:
    ms = row["ms_per_step"]
    cells = "".join(f"{ms[name]:>10.2f}" if name in ms else f"{'-':>10}" for name in COLUMNS)
    ddp = "-" if row["ddp_over_ours"] is None else f"{row['ddp_over_ours']:.2f}"
    print(
        f"{row['model']:<6}{cells}{row['ours_over_alone']:>13.3f}{row['dataset_over_alone']:>15.3f}{ddp:>10}",
        flush=True,
    )


if __name__ == "__main__":
    main()
