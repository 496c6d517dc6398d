"""Child processes of an instance, which must not join the job as the same instance."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from popdist.environments.detection import detect_instance
from popdist.environments.tf_config import read_cluster
from popdist.errors import LifeCycleError
from popdist.records.progress import DESCRIPTOR_VARIABLE, new_page
from popdist.spawned import JOINED_VARIABLE, join_once, leave_job

ROOT = Path(__file__).parents[2]
TASK = '{"cluster": {"worker": ["localhost:3737", "localhost:3738"]}, "task": {"type": "worker", "index": 1}}'
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "PMIX_NAMESPACE": "prterun-host-7@1",
}
POPRUN = MPIRUN | {
    "POPDIST_NUM_TOTAL_REPLICAS": "4",
    "POPDIST_NUM_LOCAL_REPLICAS": "2",
    "POPDIST_NUM_IPUS_PER_REPLICA": "1",
    "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE": "1",
    "POPDIST_REPLICA_INDEX_OFFSET": "2",
    "POPDIST_LOCAL_INSTANCE_INDEX": "1",
}
SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "slurm.pmix.7.0",
}
LAUNCHERS = {"poprun": POPRUN, "mpirun": MPIRUN, "slurm": SRUN, "tf_config": {"TF_CONFIG": TASK}}
CHILD = "import popdist\ntry: popdist.init()\nexcept popdist.LifeCycleError as error: print(error)"


def joined(environ: dict[str, str]) -> dict[str, str]:
    """Return the environment that children inherit from a joined process."""
    environ = dict(environ)
    join_once(detect_instance(environ), None, environ)
    return environ


def child(environ: dict[str, str], program: str = CHILD, *wrapper: str) -> str:
    """Return the output of a program that a process with this environment starts."""
    clean = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ} | {"PYTHONPATH": str(ROOT)}
    words = [*wrapper, sys.executable, "-W", "error", "-c", program]
    return subprocess.run(words, env=clean | environ, capture_output=True, text=True, check=True, timeout=100).stdout


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_child_process_may_not_join_as_the_same_instance(launcher: str) -> None:
    said = child(joined(LAUNCHERS[launcher]), CHILD, *(["env"] if launcher == "mpirun" else []))
    assert f"process {os.getpid()} is already instance 1 of 2, and has started this one (pid " in said
    assert "start this one with POPDIST_ALONE=1 in its environment" in said


def test_a_child_process_may_run_alone() -> None:
    alone = joined(POPRUN) | {"POPDIST_ALONE": "1", "POPDIST_METRICS": "csv:rows.csv", "POPDIST_TIMELINE": "/nowhere"}
    program = (
        "import os, popdist\n"
        "print(popdist.getNumInstances(), end=' ')\n"
        "popdist.init(3)\n"
        "print(popdist.getNumInstances(), popdist.getNumLocalReplicas())\n"
        "print([name for name in os.environ if name.startswith(('POPDIST_', 'OMPI_', 'PMIX_'))])\n"
    )
    assert child(alone, program) == "1 1 3\n[]\n"


def test_a_wrapper_that_does_not_join_may_start_the_program() -> None:
    environ = dict(POPRUN)
    join_once(detect_instance(environ), None, environ)
    assert environ[JOINED_VARIABLE].startswith(f"{os.getpid()}:")
    join_once(detect_instance(environ), None, environ)  # the same process, after a connection that failed


def test_a_process_replaced_by_exec_may_not_join_again() -> None:
    again = "import os, sys\nfrom popdist.environments.detection import detect_instance\n"
    again += "from popdist.spawned import join_once\njoin_once(detect_instance(os.environ), None, os.environ)\n"
    said = child(POPRUN, f"{again}os.execv(sys.executable, [sys.executable, '-c', {CHILD!r}])")
    assert "has started this one" in said


@pytest.mark.parametrize(
    "other",
    [
        POPRUN | {"PMIX_NAMESPACE": "prterun-host-8@1"},
        POPRUN
        | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
        | {"POPDIST_REPLICA_INDEX_OFFSET": "0", "POPDIST_LOCAL_INSTANCE_INDEX": "0"},
        {"TF_CONFIG": TASK},
    ],
    ids=["job", "rank", "launcher"],
)
def test_an_instance_may_start_another_job(other: dict[str, str]) -> None:
    mark = joined(POPRUN)[JOINED_VARIABLE].partition(":")[2]
    environ = other | {JOINED_VARIABLE: f"1:{mark}"}
    join_once(detect_instance(environ), None, environ)
    with pytest.raises(LifeCycleError, match="process 1 is already"):
        join_once(detect_instance(POPRUN), None, POPRUN | {JOINED_VARIABLE: f"1:{mark}"})


def test_a_worker_is_recognised_by_the_programs_cluster() -> None:
    cluster = read_cluster({"TF_CONFIG": TASK})
    environ: dict[str, str] = {}
    join_once(cluster.instance(), cluster, environ)
    environ[JOINED_VARIABLE] = "1" + environ[JOINED_VARIABLE][environ[JOINED_VARIABLE].index(":") :]
    with pytest.raises(LifeCycleError, match="instance 1 of 2"):
        join_once(cluster.instance(), cluster, environ)
    elsewhere = read_cluster({"TF_CONFIG": TASK.replace("3737", "3739")})
    join_once(elsewhere.instance(), elsewhere, environ)


def test_two_programs_side_by_side_may_not_join_as_one_instance() -> None:
    page = os.memfd_create("page")
    os.write(page, new_page())
    environ = POPRUN | {DESCRIPTOR_VARIABLE: str(page)}
    join_once(detect_instance(environ), None, dict(environ))
    os.pwrite(page, os.getppid().to_bytes(8, "little"), 8)
    with pytest.raises(LifeCycleError, match=f"process {os.getppid()} is already .* runs beside this one"):
        join_once(detect_instance(environ), None, environ)
    os.close(page)


def test_a_single_instance_may_start_any_process() -> None:
    environ = MPIRUN | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    assert JOINED_VARIABLE not in joined(environ)


def test_the_job_variables_stay_unless_the_process_runs_alone() -> None:
    environ = dict(POPRUN)
    leave_job(environ)
    assert environ == POPRUN
