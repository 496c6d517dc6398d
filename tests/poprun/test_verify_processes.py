"""Which runs `poprun verify` refuses to compare."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_verify_records import layout, process, step

from poprun.errors import PopRunError
from poprun.verify.command import check_processes
from poprun.verify.records import Record, record_of
from poprun.verify.running import Result
from poprun.verify.spreads import Run


def result_of(*lines, exit_status: int = 0) -> Result:
    return Result(record_of(lines, Path()), exit_status)


def instance(index: int, **changed) -> list:
    return [process(index, 2, **changed), layout(index), step(0, index, (2 * index, 2 * index + 2))]


def test_instances_that_train_together_may_be_compared():
    check_processes(result_of(*instance(0), *instance(1)), Run(2, 4))
    check_processes(Result(Record()), Run(2, 4))  # which is said otherwise


def test_instances_that_train_for_themselves_are_refused():
    lines = [process(strategy="IPUStrategy"), layout(), step(0)]
    check_processes(result_of(*lines), Run(1, 4))
    with pytest.raises(PopRunError, match=r"each of the 2 instances trained for itself \(IPUStrategy\)"):
        check_processes(result_of(*lines), Run(2, 4))


def test_another_number_of_replicas_is_refused():
    with pytest.raises(PopRunError, match="trained 4 replicas and 8 were asked for"):
        check_processes(result_of(*instance(0), *instance(1)), Run(2, 8))


def test_an_instance_without_a_record_is_missed_unless_it_was_lost():
    with pytest.raises(PopRunError, match="instance 1 of 2 x 2 left no record"):
        check_processes(result_of(*instance(0)), Run(2, 4))
    check_processes(result_of(*instance(0)), Run(2, 4, faults=("kill:instance=1",)))
    check_processes(result_of(*instance(0), exit_status=3), Run(2, 4))
