from __future__ import annotations

import pytest
import slurm_records as records

from popdist.environments.detection import detect_instance
from popdist.environments.slurm import VARIABLES
from popdist.errors import EnvironmentMismatchError

TF_CONFIG = {
    "TF_CONFIG": '{"cluster":{"worker":["localhost:3737","localhost:3738"]},"task":{"type":"worker","index":1}}'
}


class TestTasksConnectedByPMIx:
    def test_each_task_is_an_instance(self):
        instance = detect_instance(records.PMIX_TASK)
        assert (instance.index, instance.count, instance.local_index) == (2, 3, 0)
        assert instance.local_replica_range == range(2, 3)
        assert instance.launcher == "slurm"

    def test_the_program_may_ask_for_more_replicas(self):
        assert detect_instance(records.PMIX_TASK, num_replicas=6).local_replica_range == range(4, 6)

    def test_replicas_are_divided_evenly(self):
        with pytest.raises(EnvironmentMismatchError, match=r"SLURM_NTASKS=3.*use 3 or 6"):
            detect_instance(records.PMIX_TASK, num_replicas=5)

    def test_tasks_of_a_heterogeneous_job_are_numbered_together(self):
        instance = detect_instance(records.HETEROGENEOUS_TASK)
        assert (instance.index, instance.count, instance.local_index) == (2, 3, 1)

    @pytest.mark.parametrize("name", [*VARIABLES, "PMIX_RANK", "PMIX_NAMESPACE"])
    def test_a_half_set_environment_is_refused_with_the_missing_variable(self, name):
        environ = dict(records.PMIX_TASK)
        del environ[name]
        with pytest.raises(EnvironmentMismatchError, match=f"{name} unset.*set {name}"):
            detect_instance(environ)

    @pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_NODEID", "PMIX_RANK"])
    def test_an_invalid_number_is_quoted(self, name):
        with pytest.raises(EnvironmentMismatchError, match=f"{name}='two'"):
            detect_instance(records.PMIX_TASK | {name: "two"})

    @pytest.mark.parametrize(
        "change",
        [
            {"SLURM_PROCID": "3"},
            {"SLURM_PROCID": "1"},
            {"SLURM_NTASKS": "4"},
            {"SLURM_STEP_NUM_TASKS": "2"},
            {"SLURM_LOCALID": "3"},
            {"SLURM_NODEID": "2"},
            {"PMIX_RANK": "0"},
        ],
    )
    def test_contradictions_are_refused_with_the_set_of_variables(self, change):
        with pytest.raises(EnvironmentMismatchError, match=r"contradict.*SLURM_PROCID=.*SLURM_STEP_NUM_NODES="):
            detect_instance(records.PMIX_TASK | change)

    def test_slurm_wins_over_a_cluster_in_tf_config(self):
        assert detect_instance(records.PMIX_TASK | TF_CONFIG).launcher == "slurm"


class TestTasksWithoutPMIx:
    @pytest.mark.parametrize("environ", [records.TASK, records.TASK | records.FIRST_TASK, records.PMI2_TASK])
    def test_several_tasks_are_refused_with_the_way_out(self, environ):
        with pytest.raises(EnvironmentMismatchError, match=r"3 tasks.*PMIX_RANK unset.*`srun --mpi=pmix`"):
            detect_instance(environ)

    def test_the_message_names_the_mpi_type_of_srun(self):
        with pytest.raises(EnvironmentMismatchError, match="SLURM_MPI_TYPE=pmi2"):
            detect_instance(records.PMI2_TASK)

    @pytest.mark.parametrize("environ", [records.ONLY_TASK, records.ONLY_TASK_OF_LARGER_JOB])
    def test_a_single_task_is_one_instance_with_every_replica(self, environ):
        instance = detect_instance(environ, num_replicas=4)
        assert (instance.index, instance.count, instance.launcher) == (0, 1, "slurm")
        assert instance.local_replica_range == range(4)

    def test_a_cluster_in_tf_config_connects_the_tasks(self):
        instance = detect_instance(records.TASK | TF_CONFIG)
        assert (instance.index, instance.count, instance.launcher) == (1, 2, "tf_config")

    def test_a_task_without_its_step_is_refused(self):
        environ = {name: value for name, value in records.TASK.items() if name != "SLURM_STEP_ID"}
        with pytest.raises(EnvironmentMismatchError, match="set SLURM_STEP_ID"):
            detect_instance(environ)


class TestShellsOfAJob:
    @pytest.mark.parametrize(
        "environ",
        [
            records.JOB_OF_3,
            records.BATCH,
            records.BATCH_WITHOUT_TASKS,
            records.INTERACTIVE_STEP,
            records.HETEROGENEOUS_SHELL,
            records.SUBMITTED_BY_A_TASK,
        ],
        ids=["salloc", "sbatch", "no tasks", "interactive step", "heterogeneous", "submitted by a task"],
    )
    def test_a_shell_is_one_instance_for_any_size_of_the_job(self, environ):
        instance = detect_instance(environ, num_replicas=4)
        assert (instance.index, instance.count, instance.launcher) == (0, 1, "single")

    def test_the_step_of_a_shell_may_have_a_name(self):
        assert detect_instance(records.TASK | {"SLURM_STEP_ID": "batch"}).launcher == "single"


class TestOtherLaunchersInAJob:
    def test_mpirun_is_recognised_by_the_variables_of_its_daemon(self):
        instance = detect_instance(records.MPIRUN_RANK)
        assert (instance.index, instance.count, instance.launcher) == (2, 3, "mpirun")

    def test_poprun_is_recognised(self):
        replicas = {
            "POPDIST_NUM_TOTAL_REPLICAS": "6",
            "POPDIST_NUM_LOCAL_REPLICAS": "2",
            "POPDIST_NUM_IPUS_PER_REPLICA": "1",
            "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE": "1",
            "POPDIST_REPLICA_INDEX_OFFSET": "4",
            "POPDIST_LOCAL_INSTANCE_INDEX": "0",
        }
        instance = detect_instance(records.MPIRUN_RANK | replicas)
        assert (instance.index, instance.launcher, instance.local_replicas) == (2, "poprun", 2)
