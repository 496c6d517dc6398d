"""The other workers, with the names of TensorFlow's cluster resolvers.

Semantics: `tf.distribute.cluster_resolver.TFConfigClusterResolver` and `tf.train.ClusterSpec`, as far as they make
sense without sessions and servers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from popdist.environments import Cluster, read_cluster


@dataclass(frozen=True)
class ClusterSpec:
    """The addresses of each job; equal where all of them are.

    Attributes:
        chief: the address of the chief, if there is one.
        worker: the addresses of the workers.
    """

    chief: tuple[str, ...]
    worker: tuple[str, ...]

    def as_dict(self) -> dict[str, list[str]]:
        """Return the addresses of each job that has tasks, as in TF_CONFIG."""
        return {job: list(tasks) for job, tasks in (("chief", self.chief), ("worker", self.worker)) if tasks}

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs that have tasks."""
        return list(self.as_dict())

    def job_tasks(self, job_name: str) -> list[str]:
        """Return the addresses of a job; ValueError if there is no such job."""
        jobs = self.as_dict()
        if job_name not in jobs:
            raise ValueError(f"the cluster has no job {job_name!r}; use one of {', '.join(jobs)}")
        return jobs[job_name]

    def num_tasks(self, job_name: str) -> int:
        """Return how many tasks a job has; ValueError if there is no such job."""
        return len(self.job_tasks(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Return the indices of a job's tasks; ValueError if there is no such job."""
        return list(range(self.num_tasks(job_name)))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Return the address of one task; ValueError if there is no such task."""
        tasks = self.job_tasks(job_name)
        if task_index not in range(len(tasks)):
            raise ValueError(f"the job {job_name!r} has no task {task_index!r}; use one of 0 to {len(tasks) - 1}")
        return tasks[task_index]


class TFConfigClusterResolver:
    """The cluster that TF_CONFIG describes, and this process's place in it.

    TF_CONFIG is read and checked once, here; TensorFlow reads it at every question and lets the task be set later.
    Here no attribute can be set.

    Args:
        task_type: takes the place of what TF_CONFIG says, as do the next two.
        task_id: see `task_type`.
        rpc_layer: only `"grpc"` is spoken.
        environ: the variables of the process; None: `os.environ`.

    Raises:
        EnvironmentMismatchError: TF_CONFIG is unset or faulty; the faulty part is quoted.
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
        """All of this as one value, with the addresses in the order of the ranks."""
        return self._cluster

    @property
    def task_type(self) -> str:
        """The job of this process, `chief` or `worker`."""
        return self._cluster.task_type

    @property
    def task_id(self) -> int:
        """The position of this process in its job."""
        return self._cluster.task_id

    @property
    def rpc_layer(self) -> str | None:
        """The protocol that was asked for; if none was, None, and workers speak gRPC."""
        return self._cluster.rpc_layer

    @property
    def environment(self) -> str:
        """The empty text, as TensorFlow's is everywhere outside Google."""
        return ""

    def cluster_spec(self) -> ClusterSpec:
        """Return the addresses of all tasks."""
        return ClusterSpec(chief=self.cluster.chief, worker=self.cluster.worker)

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task, by default this one, as `grpc://host:port` where an rpc_layer was asked for.

        As in TensorFlow it is empty where the cluster has only one task.

        Raises:
            ValueError: the cluster has no such task.
        """
        address = self._address_of(task_type, task_id)
        if len(self.cluster.addresses) == 1:
            return ""
        protocol = self.rpc_layer if rpc_layer is None else rpc_layer
        return f"{protocol}://{address}" if protocol else address

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """Return how many devices of each kind a task has, by default this one.

        TensorFlow asks the machine, and finds nothing where there are only CPUs. Here the devices are simulated, one
        IPU for each task: TF_CONFIG does not say how many there are, only a strategy's `num_local_replicas` does.

        Raises:
            ValueError: the cluster has no such task.
        """
        self._address_of(task_type, task_id)
        return {"IPU": 1}

    def _address_of(self, task_type: str | None, task_id: int | None) -> str:
        job = self.task_type if task_type is None else task_type
        return self.cluster_spec().task_address(job, self.task_id if task_id is None else task_id)
