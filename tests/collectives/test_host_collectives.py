"""The collectives on values, with two and three instances under mpirun."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from host_collectives_job import checks
from mpi_jobs import HERE, mpirun_command, run_job


@pytest.mark.job
@pytest.mark.cores(2)
@pytest.mark.timeout(200)
@pytest.mark.parametrize("instances", [pytest.param(2, marks=pytest.mark.complete), 3])
def test_host_collectives_of_several_instances_pass_all_checks(
    instances: int, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    report = tmp_path / "report"
    report.touch()
    job = run_job(mpirun_command(instances, HERE / "host_collectives_job.py", str(report)))
    verdicts = dict(json.loads(line) for line in report.read_text().splitlines())
    for check, _ in checks():
        if check in verdicts:
            with subtests.test(check=check):
                assert verdicts[check] == [""] * instances, "\n".join(verdicts[check])
    missing = [check for check, _ in checks() if check not in verdicts]
    how_it_ended = f"status {job.returncode}\n{job.stdout}\n{job.stderr}"
    assert not missing, f"the job ended before {missing[0]}: {how_it_ended}"
    assert job.returncode == 0, how_it_ended
