"""Instances that mpirun has started as workers over gRPC."""

from __future__ import annotations

from popdist.environments import detect_instance, read_cluster
from poprun.verify import worker_script
from poprun.verify.worker_script import worker_environment

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


def test_a_worker_drives_the_replicas_that_the_instance_did():
    before, environ = detect_instance(STARTED), worker_environment(STARTED, "/run/x")
    instance = detect_instance(environ)
    assert instance.launcher == "tf_config"
    assert (instance.index, instance.count) == (before.index, before.count) == (1, 2)
    assert instance.local_replica_range == before.local_replica_range == range(3, 6)


def test_workers_meet_in_a_directory_and_know_no_launcher():
    environ = worker_environment(STARTED, "/run/x")
    assert read_cluster(environ).addresses == ("unix:/run/x/0", "unix:/run/x/1")
    assert environ.keys() == {"TF_CONFIG", "POPDIST_VERIFY_RECORD", "SLURM_STEP_ID", "PATH"}


def test_the_script_knows_all_that_poprun_sets():
    from popdist.environments.poprun import VARIABLES

    assert worker_script._OF_POPRUN == VARIABLES
