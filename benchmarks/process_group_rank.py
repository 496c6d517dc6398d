"""A rank of `process_group.py`; rank 0 prints a line of JSON for each case.

usage: process_group_rank.py TASK     under mpirun; TASK: sizes, models and rounds as JSON
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch_models
from torch.nn.parallel import DistributedDataParallel

import strategies.torch  # noqa: F401  # registers the backend

Call = Callable[[], object]
TURN_S = 0.02
"""Approximate time of a backend's turn."""


def main() -> None:
    task = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("popdist", init_method="popdist://")
    groups = {"popdist": dist.new_group(), "gloo": dist.new_group(backend="gloo")}
    for nbytes in task["sizes"]:
        show(nbytes, {name: reducing(group, nbytes) for name, group in groups.items()}, task["rounds"])
    for model in task["models"]:
        show(model, {name: training(group, model) for name, group in groups.items()}, task["rounds"])
    dist.destroy_process_group()


def reducing(group: dist.ProcessGroup, nbytes: int) -> Call:
    tensor = torch.ones(nbytes // 4)
    return lambda: dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)


def training(group: dist.ProcessGroup, name: str) -> Call:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch_models.MODELS[name](), process_group=group, gradient_as_bucket_view=True)
    return torch_models.in_a_loop(model, *torch_models.batch_of(name), fused=False)


def show(case: int | str, calls: dict[str, Call], rounds: int) -> None:
    """Measure a case with each backend in turns, and print the times of the slowest rank."""
    counts = {name: calls_in_a_turn(call) for name, call in calls.items()}
    times = [[seconds(call, counts[name]) for name, call in calls.items()] for _ in range(rounds)]
    of_rounds = slowest(times).T.tolist()
    if not dist.get_rank():
        print(json.dumps({"case": case} | {f"{name}_s": found for name, found in zip(calls, of_rounds, strict=True)}))
        sys.stdout.flush()


def calls_in_a_turn(call: Call) -> int:
    """Return the number of calls in a turn, the same on all ranks."""
    for _ in range(3):  # DDP makes its buckets anew after the first step
        call()
    return max(1, int(TURN_S / slowest([[seconds(call, 2)]]).item()))


def seconds(call: Call, count: int) -> float:
    """Return the time of one of `count` calls, which all ranks begin together."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - began) / count


def slowest(times: list[list[float]]) -> torch.Tensor:
    found = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found


if __name__ == "__main__":
    main()
