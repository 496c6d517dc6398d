"""The collectives on values, with two and three instances under mpirun."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache

import pytest
from host_collectives_job import checks
from mpi_jobs import HERE, mpirun_command, run_job

INSTANCES = (2, 3)
CHECKS = [name for name, _ in checks()]


@pytest.fixture(scope="session")
def run_checks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[dict[str, list[str]], str]]:
    """Runs one job per number of instances, and remembers what each check came to."""

    @cache
    def run(instances: int) -> tuple[dict[str, list[str]], str]:
        report = tmp_path_factory.mktemp("job") / "report"
        report.touch()
        job = run_job(mpirun_command(instances, HERE / "host_collectives_job.py", str(report)))
        verdicts = dict(json.loads(line) for line in report.read_text().splitlines())
        return verdicts, f"status {job.returncode}\n{job.stdout}\n{job.stderr}"

    return run


@pytest.mark.job
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("instances", INSTANCES)
def test_host_collectives(run_checks, instances: int, check: str) -> None:
    verdicts, how_the_job_ended = run_checks(instances)
    assert check in verdicts, f"the job ended before this check: {how_the_job_ended}"
    assert verdicts[check] == [""] * instances, "\n".join(verdicts[check])


@pytest.mark.job
@pytest.mark.parametrize("instances", INSTANCES)
def test_the_job_ends_well(run_checks, instances: int) -> None:
    assert run_checks(instances)[1].startswith("status 0\n"), run_checks(instances)[1]
