"""Runs that `poprun verify` refuses to compare."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_verify_records import layout, process, step

from popdist.environments.detection import detect_instance
from popdist.environments.tf_config import read_cluster
from poprun.errors import PopRunError
from poprun.verify import worker_script
from poprun.verify.command import check_processes
from poprun.verify.records import Record, record_of
from poprun.verify.running import Result, Run
from poprun.verify.worker_script import worker_environment


def result_of(*lines, exit_status: int = 0) -> Result:
    return Result(record_of(lines, Path()), exit_status)


def instance(index: int, **changed) -> list:
    return [process(index, 2, **changed), layout(index), step(0, index, (2 * index, 2 * index + 2))]


def test_instances_that_train_together_are_compared():
    check_processes(result_of(*instance(0), *instance(1)), Run(2, 4))
    check_processes(Result(Record()), Run(2, 4))  # an empty record is reported elsewhere


def test_instances_that_train_separately_are_refused():
    lines = [process(strategy="LocalStrategy"), layout(), step(0)]
    check_processes(result_of(*lines), Run(1, 4))
    with pytest.raises(PopRunError, match=r"each of the 2 instances trained for itself \(LocalStrategy\)"):
        check_processes(result_of(*lines), Run(2, 4))


def test_a_wrong_number_of_replicas_is_refused():
    with pytest.raises(PopRunError, match="trained 4 replicas, but 8 were asked for"):
        check_processes(result_of(*instance(0), *instance(1)), Run(2, 8))


def test_a_missing_record_is_refused_unless_its_instance_was_lost():
    with pytest.raises(PopRunError, match="instance 1 of 2 x 2 left no record"):
        check_processes(result_of(*instance(0)), Run(2, 4))
    check_processes(result_of(*instance(0)), Run(2, 4, faults=("kill:instance=1",)))
    check_processes(result_of(*instance(0), exit_status=3), Run(2, 4))


STARTED = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "PMIX_RANK": "1",
    "POPDIST_NUM_TOTAL_REPLICAS": "6",
    "POPDIST_NUM_IPUS_PER_REPLICA": "1",
    "POPDIST_NUM_LOCAL_REPLICAS": "3",
    "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE": "1",
    "POPDIST_REPLICA_INDEX_OFFSET": "3",
    "POPDIST_LOCAL_INSTANCE_INDEX": "1",
    "POPDIST_VERIFY_RECORD": "/records",
    "SLURM_STEP_ID": "0",
    "PATH": "/bin",
}


def test_a_worker_drives_the_replicas_of_its_instance():
    before, environ = detect_instance(STARTED), worker_environment(STARTED, "/run/x")
    instance = detect_instance(environ)
    assert instance.launcher == "tf_config"
    assert (instance.index, instance.count) == (before.index, before.count) == (1, 2)
    assert instance.local_replica_range == before.local_replica_range == range(3, 6)


def test_workers_meet_in_a_folder_without_a_launcher():
    environ = worker_environment(STARTED, "/run/x")
    assert read_cluster(environ).addresses == ("unix:/run/x/0", "unix:/run/x/1")
    assert environ.keys() == {"TF_CONFIG", "POPDIST_VERIFY_RECORD", "SLURM_STEP_ID", "PATH"}


def test_the_script_removes_all_variables_of_poprun():
    from popdist.environments.poprun import VARIABLES

    assert worker_script._OF_POPRUN == VARIABLES
