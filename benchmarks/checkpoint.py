"""What checkpoints cost: steps of the MLP of `train_step.py`, with a checkpoint every 10 steps and without, in turns.

Each instance has one replica, and one core where there are enough. Usage:

    python benchmarks/checkpoint.py [--instances 1 2] [--every 10] [--rounds 7] [--steps 50] [--json PATH]

The columns, in ms per step, medians: "plain" without checkpoints, "saving" with them; "blocked" is the time inside of
`Checkpoints.after_step` on instance 0, spread over all steps. Where all cores are busy, as they are with an instance
for each, the writer takes its time from them, which makes "saving" longer than "plain" + "blocked". "made" is how many
of the checkpoints that were due the writer could follow with.
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
    add("--instances", type=int, nargs="+", default=[1, 2], metavar="N", help="with one replica each (1 2)")
    add("--model", choices=training_task.MODELS, default="mlp", help="(%(default)s)")
    add("--batch-size", type=int, default=64, metavar="N", help="per replica (%(default)s)")
    add("--every", type=int, default=10, metavar="K", help="steps between checkpoints (%(default)s)")
    add("--rounds", type=int, default=7, metavar="N", help="turns of each way (%(default)s)")
    add("--steps", type=int, default=50, metavar="N", help="in each turn (%(default)s)")
    add("--folder", metavar="PATH", help="on the disk that is to be measured (default: that of temporary files)")
    add("--limit-s", type=float, default=300.0, metavar="SECONDS", help="for any answer (%(default)s)")
    return parser.parse_args()


def measure_and_print(instances: int, options: argparse.Namespace) -> dict[str, Any]:
    row = measure(instances, options)
    print_row(row)
    return row


def measure(instances: int, options: argparse.Namespace) -> dict[str, Any]:
    """Both ways take turns in the same processes."""
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
    """Under poprun, which pins instances to their cores where there are several."""
    poprun = [sys.executable, "-m", "poprun", "--num-instances", str(instances), "--num-replicas", str(instances)]
    program = [sys.executable, str(PROGRAM), "popdist", coordinator.path, options.model, str(options.batch_size)]
    return coordinator.start("popdist", instances, [[*poprun, *program]], environment())


def take_turn(group: Group, steps: int, **request: Any) -> tuple[float, float, float]:
    """Milliseconds per step of the slowest instance, those of them in the calls for checkpoints, and checkpoints."""
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
