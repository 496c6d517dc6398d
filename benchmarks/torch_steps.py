"""Training steps of PyTorch modules: torch alone, DDP over gloo, and `strategies.torch`.

Usage:

    python benchmarks/torch_steps.py [--instances 2] [--models cnn mlp transformer] [--rounds 15] [--json PATH]
    python benchmarks/torch_steps.py --local-replicas 4    4 replicas in this process, against the same steps in
                                                           sequence, and against plain PyTorch on a thread for each core
    python benchmarks/torch_steps.py --pipeline            cost of waiting for turns, for each block and micro-batch

Each way has a job of its own under poprun, with one replica and one core per instance. The ways take turns; printed
are medians of the ratios within a round. "in lockstep" is "torch alone" with a barrier after each step and no other
communication: the limit of a synchronous step on this machine. All use torch's fastest options here: Adam with one
fused kernel per parameter, and convolutions with channels last; `--default-adam` is torch's default, with several
kernels per parameter.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from operator import truediv
from pathlib import Path
from statistics import median

import torch
from control import Coordinator
from timing import Machine, command_line, environment, medians
from torch import nn
from torch_models import BATCH, MODELS, Step, batch_of, by_trainer, in_a_loop
from torch_steps_rank import JOBS

import strategies
import strategies.torch.poptorch as poptorch

RANK = Path(__file__).with_name("torch_steps_rank.py")
STEPS = 10
LIMIT_S = 120.0
ALONE, PEER, OURS = "torch alone", "DDP", ("DistributedModel", "Trainer", "trainingModel")
AGAINST = (ALONE, "in lockstep", PEER)
SETTINGS = ("instances", "local_replicas", "models", "rounds", "default_adam")

Times = dict[str, list[float]]


def main() -> None:
    options = read_options()
    machine = Machine()
    torch.set_num_threads(1)
    rows = {}
    if options.pipeline:
        rows["four blocks"] = compare_pipeline(options.rounds)
    elif options.local_replicas:
        for model in options.models:
            rows[model] = compare_local(model, options.local_replicas, options.rounds, not options.default_adam)
    else:
        rows = compare(options)
    for name, row in rows.items():
        print_row(name, row)
    machine.write(options, SETTINGS, rows=rows)


def read_options() -> argparse.Namespace:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--instances", type=int, default=2, metavar="N", help="instances with one replica each (%(default)s)")
    add("--models", nargs="+", default=list(MODELS), choices=list(MODELS), help="models to train (all)")
    add("--local-replicas", type=int, metavar="N", help="compare N replicas in this process")
    add("--pipeline", action="store_true", help="measure the cost of waiting for turns in a pipeline")
    add("--default-adam", action="store_true", help="use torch's default Adam, not the fused one")
    add("--rounds", type=int, default=15, metavar="N", help="turns of each way (%(default)s)")
    return parser.parse_args()


def print_row(name: str, row: dict[str, float]) -> None:
    """Print milliseconds, and ratios of times."""
    print(name)
    for kind, value in row.items():
        print(f"    {kind:<52}" + (f"{value:9.2f} x" if " / " in kind else f"{value:9.3f} ms"), flush=True)


# ---- several instances


def compare(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure all ways in turns, with each of the models."""
    count = str(options.instances)
    poprun = [sys.executable, "-m", "poprun", "--num-instances", count, "--num-replicas", count, "--summary", "no"]
    words = ["--default-adam"] * options.default_adam
    with tempfile.TemporaryDirectory(prefix="torch-steps-") as folder, Coordinator(folder, LIMIT_S) as coordinator:
        groups = {}
        for job, ways in JOBS.items():
            program = [sys.executable, str(RANK), job, coordinator.path, *words]
            group = coordinator.start(job, options.instances, [[*poprun, *program]], environment())
            groups.update(dict.fromkeys(ways, group))
        rows = {}
        for model in options.models:
            times: Times = {way: [] for way in groups}
            for round_ in range(options.rounds + 1):
                for way, group in groups.items():
                    took_s = group.ask(do="steps", way=way, model=model, count=STEPS)[0]
                    times[way] += [took_s / STEPS * 1e3] * (round_ > 0)  # the first round warms up
            rows[model] = medians(times) | ratios(times)
    return rows


def ratios(times: Times) -> dict[str, float]:
    """Return, for each of our ways, its time relative to torch alone and in lockstep, and DDP's time relative to it."""
    found = {}
    for way in OURS:
        for other in AGAINST:
            pair = (other, way) if other == PEER else (way, other)
            found[" / ".join(pair)] = median(a / b for a, b in zip(*(times[each] for each in pair), strict=True))
    return found


# ---- one process


def in_turns(steps: dict[str, Step], rounds: int) -> Times:
    """Return milliseconds of each kind of step in each round."""
    times: Times = {name: [] for name in steps}
    for round_ in range(rounds + 1):
        for name, step in steps.items():
            began = time.perf_counter()
            for _ in range(STEPS):
                step()
            times[name] += [(time.perf_counter() - began) / STEPS * 1e3] * (round_ > 0)
    return times


def compare_local(model: str, replicas: int, rounds: int, fused: bool) -> dict[str, float]:
    """Compare replicas of one process with as many plain PyTorch steps in sequence.

    Plain steps on threads share nothing: they show the gain of this machine's cores for this model.
    """
    torch.manual_seed(0)
    x, y = batch_of(model, replicas * BATCH)
    alone = [in_a_loop(MODELS[model](), x[:BATCH], y[:BATCH], fused) for _ in range(replicas)]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "plain", torch.set_num_threads, (1,)) as threads:
        steps: dict[str, Step] = {
            "one after another": lambda: [step() for step in alone],
            "plain, on threads": lambda: [each.result() for each in [threads.submit(step) for step in alone]],
            "at once": by_trainer(strategies.LocalStrategy(replicas), MODELS[model](), x, y, fused),
        }
        times = in_turns(steps, rounds)
    first, *others = times
    ratios = {f"{first} / {way}": median(map(truediv, times[first], times[way])) for way in others}
    return medians(times) | ratios


class Blocks(nn.Module):
    """Four blocks with little work."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a scalar."""
        for number, layer in enumerate(self.layers):
            with poptorch.Block(f"B{number}"):
                x = torch.tanh(layer(x))
        return x.square().mean()


def compare_pipeline(rounds: int, count: int = 16) -> dict[str, float]:
    """Measure a step with and without waiting for turns; stages on one device do not wait."""
    schedules = {
        "one device": None,
        "four devices": "one_forward_one_backward",
        "four devices, grouped": "grouped",
    }
    row = medians(in_turns({name: by_pipeline(schedule, count) for name, schedule in schedules.items()}, rounds))
    costs = {name: (row[name] - row["one device"]) / (4 * count) for name in list(row)[1:]}
    return row | {f"a block and micro-batch on {name}": cost for name, cost in costs.items()}


def by_pipeline(schedule: str | None, count: int) -> Step:
    """Return a step of four blocks with a device each, or on one device without a schedule."""
    options = poptorch.Options()
    options.Training.gradientAccumulation(count)
    stages = [poptorch.Stage(f"B{number}").ipu(0 if schedule is None else number) for number in range(4)]
    options.setExecutionStrategy(poptorch.PipelinedExecution(*stages, schedule=schedule or "one_forward_one_backward"))
    training = poptorch.trainingModel(Blocks(), options)
    return lambda: training(torch.ones(count, 8))


if __name__ == "__main__":
    main()
