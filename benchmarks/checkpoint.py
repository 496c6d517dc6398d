"""The cost of checkpoints: steps of the MLP of `train_step.py` with a checkpoint every 10 steps and without.

Each instance has one replica, and one core if there are enough. Usage:

    python benchmarks/checkpoint.py [--instances 1 2] [--every 10] [--rounds 7] [--steps 50] [--json PATH]

Columns, in ms per step, medians of turns: "plain" without checkpoints, "saving" with them; "blocked" is the time inside
`Checkpoints.after_step` on instance 0, spread over all steps. If all cores are busy, as with an instance for each core,
the writer takes time from them, and "saving" is longer than "plain" + "blocked". "made" is the part of the due
checkpoints that the writer made in time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import training_task
from control import Coordinator, Group
from timing import Machine, command_line, environment, medians

PROGRAM = Path(__file__).with_name("training_jax.py")
SETTINGS = ("model", "batch_size", "every", "rounds", "steps")
WIDTHS = {"instances": 9, "plain": 9, "saving": 9, "saving/plain": 14, "blocked": 10, "blocked/plain": 15, "made": 7}


def main() -> None:
    options = read_options()
    machine = Machine()
    print(
        f"{options.model}, batch {options.batch_size}, a checkpoint every {options.every} steps; ms per step, medians"
    )
    print("".join(f"{title:>{width}}" for title, width in WIDTHS.items()), flush=True)
    rows = [measure_and_print(instances, options) for instances in options.instances]
    machine.write(options, SETTINGS, rows=rows)


def read_options() -> argparse.Namespace:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--instances", type=int, nargs="+", default=[1, 2], metavar="N", help="instances with one replica each (1 2)")
    add("--model", choices=training_task.MODELS, default="mlp", help="(%(default)s)")
    add("--batch-size", type=int, default=64, metavar="N", help="rows per replica (%(default)s)")
    add("--every", type=int, default=10, metavar="K", help="steps between checkpoints (%(default)s)")
    add("--rounds", type=int, default=7, metavar="N", help="turns of each way (%(default)s)")
    add("--steps", type=int, default=50, metavar="N", help="steps of a turn (%(default)s)")
    add("--folder", metavar="PATH", help="folder on the disk to measure (default: the folder of temporary files)")
    add("--limit-s", type=float, default=300.0, metavar="SECONDS", help="time limit of an answer (%(default)s)")
    return parser.parse_args()


def measure_and_print(instances: int, options: argparse.Namespace) -> dict[str, Any]:
    row = measure(instances, options)
    print_row(row)
    return row


def measure(instances: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure both ways in turns, in the same processes."""
    with (
        tempfile.TemporaryDirectory(prefix="checkpoint-", dir=options.folder) as folder,
        Coordinator(folder, options.limit_s) as coordinator,
    ):
        group = start(coordinator, instances, options)
        saving = {"do": "saved", "every": options.every, "folder": f"{folder}/saved"}
        take_turn(group, training_task.WARM_UP_STEPS, do="placed")  # the last checkpoint of a turn is not its last step
        take_turn(group, 2 * options.every, **saving)
        times: dict[str, list[float]] = {"plain": [], "saving": [], "blocked": [], "made": []}
        for _ in range(options.rounds):
            times["plain"].append(take_turn(group, options.steps, do="placed")[0])
            for way, ms in zip(("saving", "blocked", "made"), take_turn(group, options.steps, **saving), strict=True):
                times[way].append(ms)
    ms = medians(times)
    made = ms.pop("made") * options.every
    return {
        "instances": instances,
        "ms_per_step": ms,
        "saving_over_plain": ms["saving"] / ms["plain"],
        "blocked_over_plain": ms["blocked"] / ms["plain"],
        "made_over_due": made,
        "rounds_ms": {way: times[way] for way in ms},
    }


def start(coordinator: Coordinator, instances: int, options: argparse.Namespace) -> Group:
    """Start the instances under poprun, which pins them to cores if there are several."""
    poprun = [sys.executable, "-m", "poprun", "--num-instances", str(instances), "--num-replicas", str(instances)]
    program = [sys.executable, str(PROGRAM), "popdist", coordinator.path, options.model, str(options.batch_size)]
    return coordinator.start("popdist", instances, [[*poprun, *program]], environment())


def take_turn(group: Group, steps: int, **request: Any) -> tuple[float, float, float]:
    """Return the slowest instance's ms per step, the part of it in calls for checkpoints, and checkpoints per step."""
    answers = group.ask(steps=steps, **request)
    took_s = max(answer["seconds"] for answer in answers)
    first = answers[0]
    return 1e3 * took_s / steps, 1e3 * first.get("blocked_s", 0.0) / steps, first.get("made", 0) / steps


def print_row(row: dict[str, Any]) -> None:
    ms = row["ms_per_step"]
    cells = {
        "instances": str(row["instances"]),
        **{way: f"{ms[way]:.2f}" for way in ("plain", "saving", "blocked")},
        "saving/plain": f"{row['saving_over_plain']:.3f}",
        "blocked/plain": f"{row['blocked_over_plain']:.3f}",
        "made": f"{row['made_over_due']:.0%}",
    }
    print("".join(f"{cells[title]:>{width}}" for title, width in WIDTHS.items()), flush=True)


if __name__ == "__main__":
    main()
