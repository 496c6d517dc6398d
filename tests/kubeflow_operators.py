"""The pods that Kubeflow's operators make of the manifests in launch_scripts/kubernetes, as their sources say.

TrainJob: kubeflow/trainer 8c0f5059, pkg/runtime/framework/plugins/{mpi/mpi.go,jobset/jobset.go}. MPIJob:
kubeflow/mpi-operator caa3c47f, pkg/controller/mpi_job_controller.go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

MANIFESTS = Path(__file__).parents[1] / "launch_scripts" / "kubernetes"
HOSTFILE = "/etc/mpi/hostfile"
NAMESPACE = "default"
CLUSTER = f"{NAMESPACE}.svc.cluster.local"

_OPEN_MPI_4 = {
    "OMPI_MCA_orte_default_hostfile": HOSTFILE,
    "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
    "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
}


@dataclass(frozen=True)
class Pods:
    """The pods of a job, as the operator and Kubernetes prepare them.

    Attributes:
        service: The name of the headless service, which is the domain of the pods.
        launcher: The host name of the launcher.
        others: The host names of the other pods.
        hostfile: The contents of the launcher's hostfile.
        environ: The variables of the launcher.
        command: The command of the launcher.
        waiting: The command of the other pods.
        keys: The folder in which the operator mounts the keys.
    """

    service: str
    launcher: str
    others: tuple[str, ...]
    hostfile: str
    environ: dict[str, str]
    command: tuple[str, ...]
    waiting: tuple[str, ...]
    keys: str

    @property
    def names(self) -> tuple[str, ...]:
        """The host names of all pods."""
        return (self.launcher, *self.others)


def read_manifest(name: str) -> Any:
    """Return the object in one of the manifests."""
    return yaml.safe_load((MANIFESTS / name).read_text())


def pods_of_trainjob(**trainer: Any) -> Pods:
    """Return the pods of trainjob.yaml under runtime.yaml, with some fields of `spec.trainer` replaced."""
    job, runtime = read_manifest("trainjob.yaml"), read_manifest("runtime.yaml")["spec"]
    name, wanted, policy = job["metadata"]["name"], job["spec"]["trainer"] | trainer, runtime["mlPolicy"]["mpi"]
    spec = runtime["template"]["spec"]
    jobs = {each["name"]: each["template"]["spec"]["template"]["spec"] for each in spec["replicatedJobs"]}
    pods = {
        "launcher": [f"{name}-launcher-0-{index}" for index in range(runtime["mlPolicy"]["numNodes"])],
        "node": [f"{name}-node-0-{index}" for index in range(max(wanted["numNodes"] - 1, 1))],
    }
    listed = [each for kind in jobs for each in pods[kind] if kind == "node" or policy["runLauncherAsNode"]]
    (launcher,) = pods["launcher"]
    return Pods(
        service=name,
        launcher=launcher,
        others=tuple(pods["node"]),
        hostfile=_lines([f"{each}.{name}" for each in listed], wanted["numProcPerNode"]),
        environ=_OPEN_MPI_4 | {"OMPI_MCA_orte_set_default_slots": str(wanted["numProcPerNode"])},
        command=(*wanted["command"], *wanted["args"]),
        waiting=_command(jobs["node"]),
        keys=policy["sshAuthMountPath"],
    )


def pods_of_mpijob(**changes: Any) -> Pods:
    """Return the pods of mpijob.yaml, with some fields of `spec` replaced."""
    job = read_manifest("mpijob.yaml")
    name, spec = job["metadata"]["name"], job["spec"] | changes
    kinds = {kind: each["template"]["spec"] for kind, each in spec["mpiReplicaSpecs"].items()}
    workers = [f"{name}-worker-{index}" for index in range(spec["mpiReplicaSpecs"]["Worker"]["replicas"])]
    launcher = f"{name}-launcher"
    listed = [launcher, *workers] if spec.get("runLauncherAsWorker") else workers
    slots = spec["slotsPerWorker"]
    return Pods(
        service=name,
        launcher=launcher,
        others=tuple(workers),
        hostfile=_lines([f"{each}.{name}.{NAMESPACE}.svc" for each in listed], slots),
        environ=_OPEN_MPI_4 | {"K_MPI_JOB_ROLE": "launcher", "OMPI_MCA_orte_set_default_slots": str(slots)},
        command=_command(kinds["Launcher"]),
        waiting=_command(kinds["Worker"]),
        keys=spec["sshAuthMountPath"],
    )


def _lines(names: Sequence[str], slots: int) -> str:
    return "".join(f"{name} slots={slots}\n" for name in names)


def _command(pod: Any) -> tuple[str, ...]:
    (container,) = pod["containers"]
    return (*container["command"], *container.get("args", ()))
