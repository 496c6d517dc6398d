"""The conformance of every backend to the same statements.

`conformance_plan` chooses the statements for each transport; with --complete each transport passes all of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from complete_tier import is_complete
from conformance_plan import (
    GRPC,
    HOROVOD,
    HOSTS,
    MECHANISMS,
    SUITES,
    USUAL_SIZES,
    WINDOW,
    groups_of_threads,
    groups_without_the_kernel,
    hosts_of,
    setting_of,
    statements_for,
)
from grpc_jobs import end_of, socket_addresses, start_worker
from horovod_installed import needs_horovod
from mpi_jobs import HERE, mpirun_command, run_job
from reference import LARGE, SPREADS, contributions, mine, reduced_contributions
from statements import LIMITS, Statement

import collectives
from collectives import Communicator, Settings, run_on_threads

pytestmark = pytest.mark.long
JOB_LIMIT_S = 500.0
TOPICS: dict[str, list[Statement]] = {}
for suite in SUITES:
    for statement in suite.statements:
        TOPICS.setdefault(statement.topic, []).append(statement)


@pytest.fixture
def complete(pytestconfig: pytest.Config) -> bool:
    """Return whether each transport passes everything."""
    return is_complete(pytestconfig, Path(__file__))


@pytest.mark.usefixtures("with_either")
@pytest.mark.parametrize("topic", TOPICS)
def test_a_single_rank_passes(topic: str, subtests: pytest.Subtests) -> None:
    for statement in TOPICS[topic]:
        if statement.at_least == 1:
            with (
                subtests.test(statement=statement.name),
                collectives.connect("single", Settings(limits=LIMITS)) as communicator,
            ):
                statement.check(communicator)


@pytest.mark.cores(2)
@pytest.mark.parametrize("topic", TOPICS)
def test_groups_of_threads_pass(topic: str, subtests: pytest.Subtests, complete: bool) -> None:
    check_on_threads(topic, subtests, partial(groups_of_threads, complete=complete))


@pytest.mark.cores(2)
@pytest.mark.usefixtures("without_kernel")
@pytest.mark.parametrize("topic", TOPICS)
def test_groups_of_threads_pass_without_the_kernel(topic: str, subtests: pytest.Subtests, complete: bool) -> None:
    check_on_threads(topic, subtests, partial(groups_without_the_kernel, complete=complete))


def check_on_threads(
    topic: str, subtests: pytest.Subtests, groups_of: Callable[[Statement], Iterable[tuple[str, int]]]
) -> None:
    for statement in TOPICS[topic]:
        for mechanism, size in groups_of(statement):
            with subtests.test(statement=statement.name, mechanism=mechanism, size=size):
                settings = Settings(limits=LIMITS, mechanism=setting_of(mechanism))
                run_on_threads(size, statement.check, settings, hosts_of(mechanism, size))


# ---- jobs, each with the results of all its statements


def over_sizes(*transports: str) -> pytest.MarkDecorator:
    """Parametrize jobs of one rank up to the usual number; only the usual number is in the default tier."""
    cases = [(transport, size) for transport in transports for size in range(1, USUAL_SIZES[transport] + 1)]
    marks = {case: () if case[1] == USUAL_SIZES[case[0]] else pytest.mark.complete for case in cases}
    return pytest.mark.parametrize(("transport", "size"), [pytest.param(*case, marks=marks[case]) for case in cases])


@pytest.mark.job
@pytest.mark.cores(2)
@pytest.mark.timeout(JOB_LIMIT_S + 20)
@over_sizes(*MECHANISMS)
def test_mpi_jobs_pass(transport: str, size: int, tmp_path: Path, subtests: pytest.Subtests, complete: bool) -> None:
    _check_mpi_job(transport, size, tmp_path, subtests, complete)


@pytest.mark.job
@pytest.mark.cores(2)
@pytest.mark.complete
@pytest.mark.timeout(JOB_LIMIT_S + 20)
@pytest.mark.parametrize("without_kernel", ["0,1,2", "1"])
def test_mpi_jobs_pass_in_which_ranks_lack_the_kernel(
    without_kernel: str, tmp_path: Path, subtests: pytest.Subtests, complete: bool
) -> None:
    _check_mpi_job(WINDOW, USUAL_SIZES[WINDOW], tmp_path, subtests, complete, without_kernel)


@pytest.mark.job
@pytest.mark.cores(2)
@pytest.mark.complete
@pytest.mark.timeout(JOB_LIMIT_S + 20)
def test_mpi_jobs_between_hosts_pass(tmp_path: Path, subtests: pytest.Subtests, complete: bool) -> None:
    _check_mpi_job(HOSTS, USUAL_SIZES[HOSTS], tmp_path, subtests, complete)


@pytest.mark.job
@pytest.mark.cores(2)
@pytest.mark.timeout(JOB_LIMIT_S + 20)
@needs_horovod
@over_sizes(HOROVOD)
def test_horovod_jobs_pass(
    transport: str, size: int, tmp_path: Path, subtests: pytest.Subtests, complete: bool
) -> None:
    _check_mpi_job(transport, size, tmp_path, subtests, complete)


@pytest.mark.job
@pytest.mark.cores(2)
@pytest.mark.timeout(JOB_LIMIT_S + 20)
@over_sizes(GRPC)
def test_grpc_jobs_pass(transport: str, size: int, tmp_path: Path, subtests: pytest.Subtests, complete: bool) -> None:
    report = tmp_path / "report"
    report.touch()
    with socket_addresses(size) as addresses:
        arguments = [str(report), _word(complete), *addresses]
        program = HERE / "grpc_conformance_job.py"
        workers = [start_worker(program, [str(rank), *arguments]) for rank in range(size)]
        ends = end_of(workers, JOB_LIMIT_S)
    text = "---".join(f"{out}\n{err}" for _, out, err in ends)
    expected = statements_for(size, transport, complete=complete)
    _check_report(report, expected, max(status for status, _, _ in ends), text, subtests)


def _check_mpi_job(
    mechanism: str, size: int, folder: Path, subtests: pytest.Subtests, complete: bool, without_kernel: str = ""
) -> None:
    report = folder / "report"
    report.touch()
    arguments = mechanism, str(report), _word(complete), without_kernel
    job = run_job(mpirun_command(size, HERE / "conformance_job.py", *arguments), JOB_LIMIT_S)
    expected = statements_for(size, mechanism, complete=complete)
    _check_report(report, expected, job.returncode, f"{job.stdout}\n{job.stderr}", subtests)


def _word(complete: bool) -> str:
    return "complete" if complete else "default"


def _check_report(
    report: Path, expected: Sequence[Statement], status: int, text: str, subtests: pytest.Subtests
) -> None:
    verdicts: dict[str, list[str]] = dict(json.loads(line) for line in report.read_text().splitlines())
    for statement in expected:
        if statement.name in verdicts:
            with subtests.test(statement=statement.name):
                failures = [
                    f"rank {rank}: {failure}" for rank, failure in enumerate(verdicts[statement.name]) if failure
                ]
                assert not failures, "\n".join(failures)
    missing = [statement.name for statement in expected if statement.name not in verdicts]
    assert not missing, f"the job ended before {missing[0]}, with status {status}: {text}"
    assert status == 0, text


# ---- spreads of replicas


def _digest(communicator: Communicator, counts: list[int]) -> str:
    first = sum(counts[: communicator.rank])
    replicas = range(first, first + counts[communicator.rank])
    result = communicator.ordered_all_reduce(contributions("float32", LARGE, replicas), op="mean")
    return hashlib.sha256(result).hexdigest()


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_twelve_replicas_give_the_same_bits_for_every_spread(mechanism: str) -> None:
    spreads = ([12], [6, 6], [1, 11], [4, 4, 4], [5, 1, 6], [3, 3, 3, 3], [1, 2, 8, 1])
    digests = {
        digest
        for counts in spreads
        for digest in run_on_threads(
            len(counts), lambda c, counts=counts: _digest(c, counts), Settings(mechanism=mechanism)
        )
    }
    assert digests == {hashlib.sha256(reduced_contributions("float32", LARGE, 12, "mean").bits).hexdigest()}


def test_the_order_of_the_contributions_matters() -> None:
    """Without this, the other tests would prove little."""
    forward = sum(contributions("float32", LARGE, range(12)))
    backward = sum(contributions("float32", LARGE, range(11, -1, -1)))
    assert np.mean(forward != backward) > 0.5


@pytest.mark.parametrize("spread", SPREADS)
def test_every_replica_belongs_to_one_rank(spread: str) -> None:
    lengths = run_on_threads(3, lambda c: (len(mine(c, "int8", 1, spread)[0]), mine(c, "int8", 1, spread)[1]))
    assert sum(length for length, _ in lengths) == lengths[0][1]
