"""The manifests and the image for Kubernetes, against the published schemas and the operators' further rules."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
from crd_schemas import DEFINITIONS, faults_of, read_schema
from kubeflow_operators import MANIFESTS, pods_of_mpijob, pods_of_trainjob, read_manifest

ROOT = Path(__file__).parents[2]
PODS = {"trainjob.yaml": pods_of_trainjob, "mpijob.yaml": pods_of_mpijob}
RESERVED = ("OMPI_MCA_", "PRTE_MCA_")


@pytest.mark.parametrize("manifest", DEFINITIONS)
def test_the_published_schema_accepts_the_manifest(manifest: str) -> None:
    assert faults_of(read_schema(manifest), read_manifest(manifest)) == []


LAUNCHER = "spec.mpiReplicaSpecs.Launcher"
NODE = "spec.template.spec.replicatedJobs.0"


@pytest.mark.parametrize(
    ("manifest", "place", "value", "fault"),
    [
        (
            "trainjob.yaml",
            "apiVersion",
            "trainer.kubeflow.org/v1",
            "apiVersion: .* is not 'trainer.kubeflow.org/v1alpha1'",
        ),
        ("trainjob.yaml", "kind", "trainjob", "kind: 'trainjob' is not 'TrainJob'"),
        ("trainjob.yaml", "metadata.name", "My_Job", "metadata.name: 'My_Job' does not match"),
        ("trainjob.yaml", "spec.trainer.numNodes", "2", r"numNodes: '2' is no integer"),
        ("trainjob.yaml", "spec.trainer.numNodes", True, r"numNodes: True is no integer"),
        ("trainjob.yaml", "spec.trainer.numNodes", -1, r"numNodes: -1 is too small"),
        ("trainjob.yaml", "spec.trainer.command", "poprun", r"command: 'poprun' is no array"),
        ("trainjob.yaml", "spec.trainer.args", ["--model", 4], r"args\[1\]: 4 is no string"),
        ("trainjob.yaml", "spec.trainer.nodes", 2, r"spec.trainer.nodes: unknown field"),
        ("trainjob.yaml", "spec.runtimeRef", {}, r"runtimeRef.name: is missing"),
        ("runtime.yaml", "spec.mlPolicy.mpi.mpiImplementation", "OpenMPI5", r"'OpenMPI5' is none of 'OpenMPI'"),
        ("runtime.yaml", f"{NODE}.template", None, r"replicatedJobs\[0\].template: None is no object"),
        ("runtime.yaml", f"{NODE}.name", "launcher", r"replicatedJobs: two elements have the same name"),
        ("mpijob.yaml", "spec.mpiImplementation", "openmpi", r"'openmpi' is none of 'OpenMPI'"),
        ("mpijob.yaml", "spec.mpiReplicaSpecs", None, r"mpiReplicaSpecs: None is no object"),
        (
            "mpijob.yaml",
            f"{LAUNCHER}.template.spec.containers.0.arguments",
            ["x"],
            r"containers\[0\].arguments: unknown field",
        ),
    ],
)
def test_a_faulty_manifest_is_refused(manifest: str, place: str, value: Any, fault: str) -> None:
    changed = copy.deepcopy(read_manifest(manifest))
    *way, last = place.split(".")
    inner: Any = changed
    for name in way:
        inner = inner[int(name) if name.isdecimal() else name]
    inner[last] = value
    assert re.search(fault, "\n".join(faults_of(read_schema(manifest), changed)))


@pytest.mark.parametrize("manifest", PODS)
def test_the_command_fills_the_slots_of_the_hostfile(manifest: str) -> None:
    pods = PODS[manifest]()
    slots = [int(line.partition("slots=")[2]) for line in pods.hostfile.splitlines()]
    words = pods.command
    assert words[0] == "poprun"
    assert int(words[words.index("--num-instances") + 1]) == sum(slots)


def test_a_failed_launcher_is_not_started_again() -> None:
    [launcher] = [
        job["template"]["spec"]
        for job in read_manifest("runtime.yaml")["spec"]["template"]["spec"]["replicatedJobs"]
        if job["name"] == "launcher"
    ]
    assert (launcher["backoffLimit"], launcher["template"]["spec"].get("restartPolicy")) == (0, "Never")
    mpijob = read_manifest("mpijob.yaml")["spec"]
    assert mpijob["runPolicy"]["backoffLimit"] == 0
    assert mpijob["mpiReplicaSpecs"]["Launcher"]["restartPolicy"] == "Never"


def test_both_jobs_run_the_same_command_and_the_same_program() -> None:
    assert pods_of_trainjob().command == pods_of_mpijob().command


def containers(value: Any) -> list[dict[str, Any]]:
    """Return all containers below a value of a manifest."""
    if isinstance(value, dict):
        found = value.get("containers", []) if isinstance(value.get("containers"), list) else []
        return found + [each for inner in value.values() for each in containers(inner)]
    return [each for inner in value for each in containers(inner)] if isinstance(value, list) else []


CONTAINERS = [each for name in DEFINITIONS for each in containers(read_manifest(name))]


def test_all_pods_have_one_image_and_one_user() -> None:
    assert len(CONTAINERS) == 4
    assert {each["image"] for each in CONTAINERS} == {"registry.example.com/popdist-everywhere"}
    assert {each["securityContext"]["runAsUser"] for each in CONTAINERS} == {1000}
    assert "--uid 1000" in CONTAINERFILE


def test_no_manifest_sets_a_variable_that_the_operators_reserve() -> None:
    assert [each for each in CONTAINERS if any(env["name"].startswith(RESERVED) for env in each.get("env", []))] == []


def test_the_trainer_finds_its_jobs_by_their_names() -> None:
    """Kubeflow Trainer looks for jobs `launcher` and `node`, and in both for a container `node`."""
    jobs = {each["name"]: each for each in read_manifest("runtime.yaml")["spec"]["template"]["spec"]["replicatedJobs"]}
    assert list(jobs) == ["node", "launcher"]
    assert [[each["name"] for each in containers(job)] for job in jobs.values()] == [["node"], ["node"]]
    labels = jobs["launcher"]["template"]["metadata"]["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert (
        read_manifest("trainjob.yaml")["spec"]["runtimeRef"]["name"]
        == read_manifest("runtime.yaml")["metadata"]["name"]
    )


CONTAINERFILE = (MANIFESTS / "Containerfile").read_text()


def test_the_image_is_made_of_files_of_the_project() -> None:
    copied = re.findall(r"(?m)^COPY (?!--from)(.+) \S+$", CONTAINERFILE)
    names = [name for names in copied for name in names.split()]
    assert "setup.py" in names
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_ports_and_places_agree() -> None:
    ssh, sshd = ((MANIFESTS / name).read_text() for name in ("ssh_config", "sshd_config"))
    (port,) = set(re.findall(r"(?m)^\s*Port (\d+)$", ssh + sshd))
    probes = [each["readinessProbe"]["tcpSocket"]["port"] for each in CONTAINERS if "readinessProbe" in each]
    assert probes == [int(port)] * 2
    keys = {pods().keys for pods in PODS.values()}
    assert {f"{folder}/{name}" for folder in keys for name in ("id_rsa", "authorized_keys")} == set(
        re.findall(r"(?m)^(?:HostKey|AuthorizedKeysFile) (\S+)$", sshd)
    )
    for pods in PODS.values():
        assert f"COPY launch_scripts/kubernetes/sshd_config {pods().waiting[-1]}\n" in CONTAINERFILE
