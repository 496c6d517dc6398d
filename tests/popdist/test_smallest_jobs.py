"""Launchers at their limits: one process, two processes, the last rank and the first invalid one."""

from __future__ import annotations

import pytest

from popdist.environments.detection import detect_instance
from popdist.errors import EnvironmentMismatchError


def mpirun_variables(rank: int, size: int, local_rank: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank),
    }


def poprun_variables(total: int, local: int, offset: int, local_instance: int, uniform: bool = True) -> dict[str, str]:
    return {
        "POPDIST_NUM_TOTAL_REPLICAS": str(total),
        "POPDIST_NUM_LOCAL_REPLICAS": str(local),
        "POPDIST_NUM_IPUS_PER_REPLICA": "1",
        "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE": str(int(uniform)),
        "POPDIST_REPLICA_INDEX_OFFSET": str(offset),
        "POPDIST_LOCAL_INSTANCE_INDEX": str(local_instance),
    }


def srun_variables(rank: int, size: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(size),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NUM_NODES": "1",
    }


class TestMpirun:
    def test_a_job_may_have_one_rank(self) -> None:
        instance = detect_instance(mpirun_variables(0, 1, 0))
        assert (instance.index, instance.count) == (0, 1)

    @pytest.mark.parametrize(("rank", "local_rank"), [(2, 0), (0, 2), (3, 3)])
    def test_a_rank_beyond_the_size_is_refused(self, rank: int, local_rank: int) -> None:
        with pytest.raises(EnvironmentMismatchError, match="a rank is not below the size"):
            detect_instance(mpirun_variables(rank, 2, local_rank))

    def test_the_last_rank_may_be_alone_on_a_host(self) -> None:
        instance = detect_instance(mpirun_variables(2, 3, 0))
        assert (instance.index, instance.local_index) == (2, 0)


class TestPoprun:
    def test_a_job_may_have_one_instance_with_one_replica(self) -> None:
        instance = detect_instance(mpirun_variables(0, 1, 0) | poprun_variables(1, 1, 0, 0))
        assert (instance.count, instance.total_replicas, instance.ipus_per_replica) == (1, 1, 1)

    def test_uneven_blocks_end_with_the_last_replica(self) -> None:
        last = mpirun_variables(1, 2, 1) | poprun_variables(5, 2, 3, 1, uniform=False)
        assert detect_instance(last).local_replica_range == range(3, 5)
        with pytest.raises(EnvironmentMismatchError, match="contradict each other"):
            detect_instance(last | {"POPDIST_REPLICA_INDEX_OFFSET": "4"})


class TestSrun:
    def test_only_one_task_is_accepted_without_pmix(self) -> None:
        assert detect_instance(srun_variables(0, 1)).count == 1
        with pytest.raises(EnvironmentMismatchError, match="srun started 2 tasks"):
            detect_instance(srun_variables(0, 2))

    def test_several_tasks_are_accepted_with_pmix(self) -> None:
        pmix = {"PMIX_RANK": "1", "PMIX_NAMESPACE": "slurm.pmix.7.0"}
        instance = detect_instance(srun_variables(1, 2) | pmix, num_replicas=6)
        assert (instance.index, instance.count, instance.local_replica_range) == (1, 2, range(3, 6))
