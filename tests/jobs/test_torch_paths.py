"""Gradients go over PyTorch's own collectives: gloo in these jobs, by the code that uses NCCL on GPUs."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from poprun_jobs import ROOT, start_mpirun

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


def test_compiled_collectives_of_torch_give_the_bits_of_the_host() -> None:
    finished = start_mpirun(3, *PROGRAM).finish()
    assert finished.status == 0, finished.stderr
    assert [finished.lines_of(instance) for instance in range(3)] == [HOLDS] * 3
