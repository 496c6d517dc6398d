"""The cost of surviving: steps with and without `--on-failure shrink`, and the first step after a SIGKILL.

Usage:

    python benchmarks/survival.py [--model mlp] [--rounds 7] [--steps 50] [--kills 5] [--json PATH]
    python benchmarks/survival.py --spares [--kills 5]

First table, ms per step, medians: two jobs of two instances with one replica each take turns; nothing fails.

Second table, ms, medians over jobs: one of three instances with two replicas each is killed. "after" is the time from
the kill to the end of the interrupted step on the slowest survivor; "compile" is JAX's time to trace and compile in it
(about zero, because a program does not depend on the number of local replicas); "step" is an undisturbed step before;
"rest" is after - compile - step.

With `--spares`, only the second loss is measured, under `shrink` and with a spare that takes the lost instance's place,
in turns. "step" and "later" are undisturbed steps before and after the loss, on an instance that was there before.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import training_task
from control import Coordinator, Group
from timing import Machine, command_line, environment, medians

HERE = Path(__file__).parent
MODES = {"stop": (), "shrink": ("--on-failure", "shrink")}
COLUMNS = ("after", "compile", "step", "rest")
WITH_SPARE = ("--spares", "1")


def main() -> None:
    options = read_options()
    machine = Machine()
    if options.spares:
        machine.write(options, (), recovery=show_replacement(options))
        return
    overhead = measure_overhead(options)
    print(f"{options.model}, batch {options.batch_size}, 2 instances, nothing fails; ms per step, medians")
    print(f"{'stop':>9}{'shrink':>9}{'shrink/stop':>13}")
    print(f"{overhead['stop']:9.2f}{overhead['shrink']:9.2f}{overhead['shrink'] / overhead['stop']:13.3f}", flush=True)
    recovery = measure_recovery(options)
    print(f"\n{options.model}, batch {options.batch_size}, 3 x 2 replicas, one instance is killed; ms, medians")
    print("".join(f"{name:>9}" for name in COLUMNS))
    print("".join(f"{recovery[name]:9.1f}" for name in COLUMNS), flush=True)
    machine.write(options, (), overhead=overhead, recovery=recovery)


def read_options() -> argparse.Namespace:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--model", choices=training_task.MODELS, default="mlp", help="(%(default)s)")
    add("--batch-size", type=int, default=64, metavar="N", help="rows per replica (%(default)s)")
    add("--rounds", type=int, default=7, metavar="N", help="turns of each job (%(default)s)")
    add("--steps", type=int, default=50, metavar="N", help="steps of a turn (%(default)s)")
    add(
        "--kills",
        type=int,
        default=5,
        metavar="N",
        help="jobs in which an instance is killed (%(default)s)",
    )
    add("--spares", action="store_true", help="compare a loss under shrink with one that a spare replaces")
    add("--limit-s", type=float, default=300.0, metavar="SECONDS", help="time limit of an answer (%(default)s)")
    return parser.parse_args()


def measure_overhead(options: argparse.Namespace) -> dict[str, float]:
    """Return milliseconds per step in both modes, measured in turns."""
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    with ExitStack() as stack:
        groups = {mode: start(stack, mode, options) for mode in MODES}
        for group in groups.values():
            take_turn(group, training_task.WARM_UP_STEPS)
        for _ in range(options.rounds):
            for mode, group in groups.items():
                times[mode].append(take_turn(group, options.steps))
    return medians(times)


def start(stack: ExitStack, mode: str, options: argparse.Namespace) -> Group:
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="survival-"))
    coordinator = stack.enter_context(Coordinator(folder, options.limit_s))
    program = [sys.executable, str(HERE / "training_jax.py"), "popdist", coordinator.path]
    words = [*poprun(MODES[mode], 2, 2), *program, options.model, str(options.batch_size)]
    return coordinator.start("popdist", 2, [words], environment())


def take_turn(group: Group, steps: int) -> float:
    """Return milliseconds per step of the slowest instance."""
    return 1e3 * max(answer["seconds"] for answer in group.ask(do="placed", steps=steps)) / steps


def measure_recovery(options: argparse.Namespace) -> dict[str, float]:
    """Return the milliseconds of the second table."""
    found = [lose_one(kill % 3, options) for kill in range(options.kills)]
    return {name: median(each[name] for each in found) for name in COLUMNS}


def show_replacement(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure and print losses under shrink, and losses that a spare replaces."""
    found: dict[str, list[dict[str, float]]] = {"shrink": [], "replace": []}
    for kill in range(options.kills):
        for mode, each in found.items():
            each.append(lose_one(kill % 3, options, spares=mode == "replace"))
    columns = (*COLUMNS, "later")
    medians_of = {mode: {name: median(one[name] for one in each) for name in columns} for mode, each in found.items()}
    print(
        f"{options.model}, batch {options.batch_size}, 3 x 2 replicas, one instance is killed; ms, medians of ", end=""
    )
    print(f"{options.kills} jobs each, in turns")
    print(f"{'':>12}" + "".join(f"{name:>9}" for name in columns))
    for mode, each in medians_of.items():
        print(f"{mode:>12}" + "".join(f"{each[name]:9.1f}" for name in columns))
    ratios = {name: medians_of["replace"][name] / medians_of["shrink"][name] for name in ("after", "step", "later")}
    print(f"{'ratio':>12}" + "".join(f"{ratios.get(name, float('nan')):9.2f}" for name in columns), flush=True)
    print(f"later/step under replace: {medians_of['replace']['later'] / medians_of['replace']['step']:.2f}", flush=True)
    return medians_of


def lose_one(victim: int, options: argparse.Namespace, spares: bool = False) -> dict[str, float]:
    """Run a job in which one instance is killed, and return its milliseconds."""
    with tempfile.TemporaryDirectory(prefix="survival-") as folder:
        arguments = [folder, options.model, str(options.batch_size), str(victim), "16", str(int(spares))]
        how = WITH_SPARE if spares else MODES["shrink"]
        words = [*poprun(how, 3, 6), sys.executable, str(HERE / "survival_rank.py"), *arguments]
        ended = subprocess.run(
            words, env=environment(), capture_output=True, text=True, timeout=options.limit_s, check=False
        )
        if ended.returncode:
            raise SystemExit(f"the job failed: {ended.stderr}")
        return slowest([json.loads(path.read_text()) for path in Path(folder).glob("*.json")])


def slowest(instances: list[dict[str, Any]]) -> dict[str, float]:
    one = max(instances, key=lambda each: each["after_s"])
    old = max((each for each in instances if not each["is_spare"]), key=lambda each: each["after_s"])
    after, compiling = (1e3 * one[name] for name in ("after_s", "compile_s"))
    step, later = (1e3 * old[name] for name in ("step_s", "later_s"))
    return {"after": after, "compile": compiling, "step": step, "later": later, "rest": after - compiling - step}


def poprun(how: Sequence[str], instances: int, replicas: int) -> list[str]:
    words = [sys.executable, "-m", "poprun", *how]
    return [*words, "--num-instances", str(instances), "--num-replicas", str(replicas)]


if __name__ == "__main__":
    main()
