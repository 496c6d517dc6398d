"""Gradients over PyTorch's own collectives: gloo in these jobs, with the code that uses NCCL on GPUs."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from poprun_jobs import ROOT, run, start_mpirun

pytestmark = [
    pytest.mark.job,
    pytest.mark.cores(2),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"),
]
PROGRAM = (sys.executable, "-m", "mpi4py", str(ROOT / "tests" / "jobs" / "programs" / "path_of_torch.py"))
HOLDS = [
    "same bits",
    "no thread left",
    "a group of the program's own is undisturbed",
    "who has gone is missed",
    "waits have a limit",
]

LEAVES = """
import sys
import torch
import strategies.torch
strategy = strategies.PopDistStrategy(defaults=strategies.Defaults(exchange="compiled"))
module = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(module.parameters(), 0.1)
loss_fn = lambda module, batch: module(batch).sum()
trainer = strategies.torch.Trainer(strategy, module, loss_fn, optimizer, replica_device="cpu")
trainer.step(torch.ones(1, 4))
if strategy.instance_index == 1:
    sys.exit(0)
trainer.step(torch.ones(1, 4))
"""


def test_compiled_collectives_of_torch_give_the_bits_of_the_host() -> None:
    finished = start_mpirun(3, *PROGRAM).finish()
    assert finished.status == 0, finished.stderr
    assert [finished.lines_of(instance) for instance in range(3)] == [HOLDS] * 3


@pytest.mark.complete
def test_collectives_of_torch_do_not_wait_for_an_instance_that_left_early() -> None:
    finished = run("--num-instances", "2", "--num-replicas", "2", sys.executable, "-c", LEAVES)
    assert finished.status == 1, finished.stderr
    assert finished.own_lines[0].endswith(" left the program too early: instance 0 still needed it")
