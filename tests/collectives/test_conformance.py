"""Every backend passes the same statements."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import conformance
import conformance_checks
import conformance_grouped
import conformance_horovod
import conformance_named
import numpy as np
import pytest
from grpc_jobs import end_of, socket_addresses, start_worker
from horovod_installed import needs_horovod
from mpi_jobs import HERE, mpirun_command, run_job
from reference import LARGE, SPREADS, contributions, mine, reduced_contributions
from statements import LIMITS, Statement

import collectives
from collectives import Communicator, Settings, run_on_threads

SIZES = (1, 2, 3, 4)
JOB_SIZES = (1, 2, 3)
MECHANISMS = ("ring", "window")
GRPC = "grpc"
HOROVOD = "horovod"
JOB_LIMIT_S = 250.0
SUITES = (conformance.suite, conformance_checks.suite, conformance_grouped.suite, conformance_named.suite)


def statements_for(size: int, mechanism: str = "") -> list[Statement]:
    """All statements about a group of `size` ranks."""
    suites = (*SUITES, conformance_horovod.suite) if mechanism == HOROVOD else SUITES
    return [statement for suite in suites for statement in suite.statements if statement.at_least <= size]


def each_statement(sizes: tuple[int, ...], mechanism: str = "") -> pytest.MarkDecorator:
    cases = [(size, statement) for size in sizes for statement in statements_for(size, mechanism)]
    return pytest.mark.parametrize(
        ("size", "statement"), cases, ids=[f"{size} ranks-{statement}" for size, statement in cases]
    )


@pytest.mark.parametrize("statement", statements_for(1), ids=str)
def test_alone(statement: Statement) -> None:
    with collectives.connect("single", Settings(limits=LIMITS)) as communicator:
        statement.check(communicator)


@each_statement(SIZES)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_on_threads(mechanism: str, size: int, statement: Statement) -> None:
    run_on_threads(size, statement.check, Settings(limits=LIMITS, mechanism=mechanism))


@pytest.fixture(scope="session")
def run_statements(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], dict[str, list[str]]]:
    """Runs one job per number of ranks and mechanism, and remembers what each statement came to."""

    @cache
    def run(size: int, mechanism: str) -> tuple[dict[str, list[str]], str]:
        report = tmp_path_factory.mktemp("job") / "report"
        report.touch()
        if mechanism == GRPC:
            return _run_workers(size, report)
        command = mpirun_command(size, HERE / "conformance_job.py", mechanism, str(report))
        job = run_job(command, JOB_LIMIT_S)
        return _read_report(report), f"status {job.returncode}\n{job.stdout}\n{job.stderr}"

    return run


def _run_workers(size: int, report: Path) -> tuple[dict[str, list[str]], str]:
    program = HERE / "grpc_conformance_job.py"
    with socket_addresses(size) as addresses:
        workers = [start_worker(program, [str(rank), str(report), *addresses]) for rank in range(size)]
        ends = end_of(workers, JOB_LIMIT_S)
    texts = [f"{out}\n{err}" for _, out, err in ends]
    return _read_report(report), f"status {max(status for status, _, _ in ends)}\n{'---'.join(texts)}"


def _read_report(report: Path) -> dict[str, list[str]]:
    return dict(json.loads(line) for line in report.read_text().splitlines())


def in_a_job(test: Callable[..., None]) -> Callable[..., None]:
    """A test of what a job says in which ranks wait for each other thousands of times.

    Beside other tests each wait takes as long as the turns of those, so that minutes become of seconds.
    """
    for mark in (pytest.mark.job, pytest.mark.alone, pytest.mark.timeout(JOB_LIMIT_S + 20)):
        test = mark(test)
    return test


@in_a_job
@each_statement(JOB_SIZES)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_over_mpi(run_statements, mechanism: str, size: int, statement: Statement) -> None:
    _check(run_statements, mechanism, size, statement)


@in_a_job
@each_statement(JOB_SIZES)
def test_over_grpc(run_statements, size: int, statement: Statement) -> None:
    _check(run_statements, GRPC, size, statement)


@in_a_job
@needs_horovod
@each_statement(JOB_SIZES, HOROVOD)
def test_over_horovod(run_statements, size: int, statement: Statement) -> None:
    _check(run_statements, HOROVOD, size, statement)


def _check(run_statements, mechanism: str, size: int, statement: Statement) -> None:
    verdicts, how_the_job_ended = run_statements(size, mechanism)
    assert statement.name in verdicts, f"the job ended before this statement: {how_the_job_ended}"
    failures = [f"rank {rank}: {text}" for rank, text in enumerate(verdicts[statement.name]) if text]
    assert not failures, "\n".join(failures)


@in_a_job
@pytest.mark.parametrize("size", JOB_SIZES)
@pytest.mark.parametrize("mechanism", [*MECHANISMS, GRPC])
def test_a_job_of_all_statements_ends_well(run_statements, mechanism: str, size: int) -> None:
    _check_end(run_statements, mechanism, size)


@in_a_job
@needs_horovod
@pytest.mark.parametrize("size", JOB_SIZES)
def test_a_job_of_all_statements_over_horovod_ends_well(run_statements, size: int) -> None:
    _check_end(run_statements, HOROVOD, size)


def _check_end(run_statements, mechanism: str, size: int) -> None:
    _, how_the_job_ended = run_statements(size, mechanism)
    assert how_the_job_ended.startswith("status 0\n"), how_the_job_ended


def _digest(communicator: Communicator, counts: list[int]) -> str:
    first = sum(counts[: communicator.rank])
    replicas = range(first, first + counts[communicator.rank])
    result = communicator.ordered_all_reduce(contributions("float32", LARGE, replicas), op="mean")
    return hashlib.sha256(result).hexdigest()


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_twelve_replicas_give_the_same_bits_however_they_are_spread(mechanism: str) -> None:
    spreads = ([12], [6, 6], [1, 11], [4, 4, 4], [5, 1, 6], [3, 3, 3, 3], [1, 2, 8, 1])
    digests = {
        digest
        for counts in spreads
        for digest in run_on_threads(
            len(counts), lambda c, counts=counts: _digest(c, counts), Settings(mechanism=mechanism)
        )
    }
    assert digests == {hashlib.sha256(reduced_contributions("float32", LARGE, 12, "mean").bits).hexdigest()}


def test_the_order_of_these_contributions_shows_in_their_sum() -> None:
    """Otherwise the tests above would prove little."""
    forward = sum(contributions("float32", LARGE, range(12)))
    backward = sum(contributions("float32", LARGE, range(11, -1, -1)))
    assert np.mean(forward != backward) > 0.5


@pytest.mark.parametrize("spread", SPREADS)
def test_every_replica_belongs_to_one_rank(spread: str) -> None:
    lengths = run_on_threads(3, lambda c: (len(mine(c, "int8", 1, spread)[0]), mine(c, "int8", 1, spread)[1]))
    assert sum(length for length, _ in lengths) == lengths[0][1]
