"""A program whose forked children call collectives of all kinds; each line says what came of it."""

from __future__ import annotations

import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable, Iterable

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI  # before popdist, so that mpi4py would finalize MPI at the end of Python
from torch.utils.data import DataLoader, Dataset

import popdist
import strategies.torch
from collectives import ForkedProcessError

warnings.simplefilter("ignore")  # Python 3.12 says that threads and forks are dangerous together
INPUTS = torch.arange(48.0).reshape(16, 3) / 48


def loss_of(module: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (module(batch["x"]) - 1).square().mean()


def mean(value: float) -> float:
    return float(popdist.allreduce(np.full(3, value))[0])


def group_sum(value: float) -> float:
    tensor = torch.full((3,), value)
    dist.all_reduce(tensor)
    return float(tensor[0])


class Rows(Dataset[float]):
    """Rows whose values need all instances."""

    def __init__(self, value_of: Callable[[float], float]) -> None:
        self.value_of = value_of

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> float:
        return self.value_of(100.0 + number)


def is_refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except ForkedProcessError as error:
        return "a child that was forked from" in str(error)
    return False


def status_of_child(act: Callable[[], object]) -> int:
    """Return the status of a child that ends as programs do, by the end of Python."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    act()
    sys.exit(3)


def in_pool() -> Iterable[float]:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.map(mean, [100.0, 200.0])


def main() -> None:
    popdist.init()
    strategy = strategies.PopDistStrategy()
    dist.init_process_group("popdist", init_method="popdist://")
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 1)
    rows = strategies.torch.distribute_dataset(strategy, {"x": INPUTS}, 2, shuffle=False)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    trainer = strategies.torch.Trainer(strategy, module, loss_of, optimizer)
    model = strategies.torch.DistributedModel(torch.nn.Linear(3, 1), strategy)
    batch = next(iter(rows.epoch(0)))
    trainer.step(batch)
    trainer.evaluate(rows)
    model(batch["x"]).mean().backward()
    before = module.weight.detach().clone()
    rank, other = popdist.getInstanceIndex(), 1 - popdist.getInstanceIndex()
    begun = [dist.all_reduce(torch.ones(2), async_op=True)] if rank == 0 else []
    calls: dict[str, Callable[[], object]] = {
        "popdist": lambda: mean(100.0),
        "synchronize": popdist.synchronize,
        "finalize": popdist.finalizeBackend,
        "group": lambda: group_sum(100.0),
        "group, async": lambda: dist.all_reduce(torch.ones(3), async_op=True),
        "group, begun before": lambda: [work.wait() for work in begun] or group_sum(1.0),
        "send": lambda: dist.send(torch.ones(3), other),
        "receive": lambda: dist.recv(torch.ones(3), other),
        "step": lambda: trainer.step(batch),
        "evaluate": lambda: trainer.evaluate(rows),
        "predict": lambda: list(trainer.predict(rows, lambda one, batch: one(batch["x"]))),
        "loss.backward": lambda: model(batch["x"]).mean().backward(),
        "model.backward": lambda: model.backward(lambda batch: loss_of(model, batch), batch),
        "run": lambda: strategy.run(lambda value: value, args=(1.0,)),
        "reduce": lambda: strategy.reduce("sum", np.ones(3)),
        "on_chief": lambda: strategy.on_chief(lambda: print("the duty of the chief in a child", flush=True)),
        "pool": in_pool,
        "worker": lambda: list(DataLoader(Rows(mean), 2, num_workers=1)),
        "worker, group": lambda: list(DataLoader(Rows(group_sum), 2, num_workers=1)),
    }

    def act() -> None:
        popdist.init()  # as before: it is an instance's child, which may ask who the instance is
        assert (popdist.getInstanceIndex(), popdist.getNumInstances(), strategy.num_replicas_in_sync) == (rank, 2, 2)
        assert MPI.COMM_WORLD.Get_rank() == rank
        print("not refused:", [name for name, call in calls.items() if not is_refused(call)], flush=True)

    print("status of the child:", status_of_child(act), flush=True)
    print("refused in workers:", [is_refused(calls[name]) for name in ("pool", "worker", "worker, group")], flush=True)
    begun = begun or [dist.all_reduce(torch.ones(2), async_op=True)]
    begun[0].wait()
    sums = [call(5.0 + number) for number in range(4) for call in (mean, group_sum)]
    print("sums:", sums, flush=True)
    print("is as before:", bool((module.weight == before).all()), flush=True)
    trainer.step(batch)
    print("trained:", trainer.steps_made, flush=True)


if __name__ == "__main__":
    main()
