"""Loss of an instance under --on-failure shrink after others have already ended."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from poprun_jobs import Finished, start

PROGRAM = Path(__file__).parent / "programs" / "ending_apart.py"
LIMIT_S = 100.0

pytestmark = [pytest.mark.job, pytest.mark.cores(2), pytest.mark.timeout(150)]


def end_apart(case: str, instances: int, folder: Path) -> Finished:
    shape = (f"--num-instances={instances}", f"--num-replicas={instances}", "--on-failure=shrink")
    return start(*shape, sys.executable, str(PROGRAM), case, str(folder)).finish(LIMIT_S)


@pytest.mark.complete
def test_the_chief_completes_after_an_instance_waiting_at_its_end_is_lost(tmp_path: Path):
    finished = end_apart("waiting", 3, tmp_path)
    assert finished.status == 0, finished.stderr
    assert finished.lines_of(0) == ["the result", "chief"]


def test_loss_of_the_chief_fails_the_job_when_all_others_have_ended(tmp_path: Path):
    finished = end_apart("chief", 2, tmp_path)
    assert finished.status == 1
    said = [line for line in finished.stderr.splitlines() if "POPRUN [E] first cause: " not in line]
    assert "\n".join(said).count("instance 0 was lost when all others had finished") == 1
    assert "write them in strategy.on_chief" in finished.stderr


@pytest.mark.complete
def test_a_working_instance_carries_on_without_ended_and_lost_ones(tmp_path: Path):
    finished = end_apart("at-work", 3, tmp_path)
    assert finished.status == 0, finished.stderr
    assert finished.lines_of(2) == ["instance 0 of 1, chief: True, sum 1"]
