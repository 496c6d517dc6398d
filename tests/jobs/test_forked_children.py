"""Forked children of instances: each collective is refused by name, and the parents' results stay right."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from poprun_jobs import ROOT, run

PROGRAM = str(ROOT / "tests" / "jobs" / "programs" / "forked_children.py")
SAID = [
    "not refused: []",
    "status of the child: 3",
    "refused in workers: [True, True, True]",
    "sums: [10.0, 10.0, 12.0, 12.0, 14.0, 14.0, 16.0, 16.0]",
    "is as before: True",
    "trained: 2",
]


@pytest.mark.job
@pytest.mark.cores(2)
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
def test_forked_children_are_refused_by_name_and_disturb_no_instance():
    finished = run("-n", "2", sys.executable, PROGRAM)
    assert finished.status == 0, finished.stderr
    assert [finished.lines_of(instance) for instance in range(2)] == [SAID, SAID]
    assert finished.own_lines == []
