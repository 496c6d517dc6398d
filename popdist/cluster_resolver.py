"""The workers of TF_CONFIG, with the names of TensorFlow's cluster resolvers.

Semantics: `tf.distribute.cluster_resolver.TFConfigClusterResolver` and `tf.train.ClusterSpec`, except for sessions and
servers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from popdist.environments.tf_config import Cluster, read_cluster


@dataclass(frozen=True)
class ClusterSpec:
    """The addresses of each job. Two specs are equal if all addresses are equal.

    Attributes:
        chief: Address of the chief; empty without a chief.
        worker: Addresses of the workers.
    """

    chief: tuple[str, ...]
    worker: tuple[str, ...]

    def as_dict(self) -> dict[str, list[str]]:
        """Return the addresses of each job that has at least one task, as in TF_CONFIG."""
        return {job: list(tasks) for job, tasks in (("chief", self.chief), ("worker", self.worker)) if tasks}

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs that have at least one task."""
        return list(self.as_dict())

    def job_tasks(self, job_name: str) -> list[str]:
        """Return the addresses of a job; raise ValueError if it does not exist."""
        jobs = self.as_dict()
        if job_name not in jobs:
            raise ValueError(f"the cluster has no job {job_name!r}; use one of {', '.join(jobs)}")
        return jobs[job_name]

    def num_tasks(self, job_name: str) -> int:
        """Return the number of tasks of a job; raise ValueError if it does not exist."""
        return len(self.job_tasks(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Return the indices of a job's tasks; raise ValueError if the job does not exist."""
        return list(range(self.num_tasks(job_name)))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Return the address of a task; raise ValueError if it does not exist."""
        tasks = self.job_tasks(job_name)
        if task_index not in range(len(tasks)):
            raise ValueError(f"the job {job_name!r} has no task {task_index!r}; use one of 0 to {len(tasks) - 1}")
        return tasks[task_index]


class TFConfigClusterResolver:
    """The cluster of TF_CONFIG, and the task of this process.

    TF_CONFIG is read and checked once, in the constructor, and attributes are read-only. TensorFlow, in contrast, reads
    it at every query and allows to set the task later.

    Args:
        task_type: Type of this task; default: from TF_CONFIG.
        task_id: Index of this task; default: from TF_CONFIG.
        rpc_layer: Protocol; only `"grpc"` is supported. Default: from TF_CONFIG.
        environ: Environment variables of the process; None: `os.environ`.

    Raises:
        EnvironmentMismatchError: TF_CONFIG is unset or invalid. The message quotes the invalid part.
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        variables = os.environ if environ is None else environ
        self._cluster = read_cluster(variables, task_type, task_id, rpc_layer)

    @property
    def cluster(self) -> Cluster:
        """The cluster as one value, with the addresses in rank order."""
        return self._cluster

    @property
    def task_type(self) -> str:
        """The job of this process: `chief` or `worker`."""
        return self._cluster.task_type

    @property
    def task_id(self) -> int:
        """The position of this process in its job."""
        return self._cluster.task_id

    @property
    def rpc_layer(self) -> str | None:
        """The protocol that the user asked for, or None; workers speak gRPC in both cases."""
        return self._cluster.rpc_layer

    @property
    def environment(self) -> str:
        """The empty string, as in TensorFlow everywhere outside Google."""
        return ""

    def cluster_spec(self) -> ClusterSpec:
        """Return the addresses of all tasks."""
        return ClusterSpec(chief=self.cluster.chief, worker=self.cluster.worker)

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task (default: this task), as `grpc://host:port` if an rpc_layer was given.

        As in TensorFlow, it is empty if the cluster has only one task.

        Raises:
            ValueError: The cluster has no such task.
        """
        address = self._address_of(task_type, task_id)
        if len(self.cluster.addresses) == 1:
            return ""
        protocol = self.rpc_layer if rpc_layer is None else rpc_layer
        return f"{protocol}://{address}" if protocol else address

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """Return the number of devices of each kind of a task (default: this task).

        TensorFlow asks the machine, and finds no devices on a machine with CPUs only. Here devices are simulated: the
        answer is one IPU per task, because only a strategy's `num_local_replicas` tells the true number.

        Raises:
            ValueError: The cluster has no such task.
        """
        self._address_of(task_type, task_id)
        return {"IPU": 1}

    def _address_of(self, task_type: str | None, task_id: int | None) -> str:
        job = self.task_type if task_type is None else task_type
        return self.cluster_spec().task_address(job, self.task_id if task_id is None else task_id)
