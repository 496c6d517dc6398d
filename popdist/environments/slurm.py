"""Instances started by Slurm's srun: one task of a job step is one instance, and PMIx connects them.

What the variables mean: https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES. What Slurm sets where
was recorded with 22.05; tests/slurm_records.py has the records.
"""

from __future__ import annotations

from collections.abc import Mapping

from popdist.environments.environment import Environment, LaunchedProcess, quote, read_whole_number, require_all
from popdist.errors import EnvironmentMismatchError
from popdist.instance import Instance

JOB = "SLURM_JOB_ID"
STEP = "SLURM_STEP_ID"
RANK = "SLURM_PROCID"
SIZE = "SLURM_NTASKS"
LOCAL_RANK = "SLURM_LOCALID"
HOST = "SLURM_NODEID"
STEP_SIZE = "SLURM_STEP_NUM_TASKS"
STEP_HOSTS = "SLURM_STEP_NUM_NODES"
VARIABLES = (JOB, STEP, RANK, SIZE, LOCAL_RANK, HOST, STEP_SIZE, STEP_HOSTS)
"""What srun sets for every task, in the order in which messages name it."""

PMIX_RANK = "PMIX_RANK"
PMIX_VARIABLES = (PMIX_RANK, "PMIX_NAMESPACE")

_SHELL_STEPS = frozenset(("4294967290", "4294967291", "4294967292", "interactive", "batch", "extern"))
"""The steps of a shell with the allocation around it (slurm.h: SLURM_INTERACTIVE_STEP, SLURM_BATCH_SCRIPT, ...)."""

_TASKS, _STEP_TASKS = "SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"


def is_task(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this process, rather than sbatch or salloc the shell around it.

    A job that is submitted from within a step inherits the step's variables, and is known by what sbatch replaced.
    """
    if STEP not in environ:
        return environ.get(RANK, "0") != "0"
    is_inherited = _STEP_TASKS in environ and environ.get(_TASKS, environ[_STEP_TASKS]) != environ[_STEP_TASKS]
    return environ[STEP] not in _SHELL_STEPS and not is_inherited


def read_task(environ: Mapping[str, str]) -> LaunchedProcess:
    """Return the task that Slurm's variables describe.

    Raises:
        EnvironmentMismatchError: they are incomplete, not numbers, or contradict each other.
    """
    require_all(environ, VARIABLES, "Slurm")
    task = LaunchedProcess.read(environ, RANK, SIZE, LOCAL_RANK)
    agree = (
        task.local_rank <= task.rank < task.size
        and task.size == read_whole_number(environ, STEP_SIZE, 1)
        and read_whole_number(environ, HOST, 0) < read_whole_number(environ, STEP_HOSTS, 1)
    )
    if not agree:
        raise EnvironmentMismatchError(
            f"the variables of Slurm contradict each other: {quote(environ, VARIABLES)}; "
            "start the program with `srun --mpi=pmix`, and set none of them by hand"
        )
    return task


class SlurmEnvironment(Environment):
    """`srun --mpi=pmix`. The replicas are divided evenly among the tasks; one per task unless the program asks."""

    def is_active(self, environ: Mapping[str, str]) -> bool:
        return is_task(environ) and any(name in environ for name in PMIX_VARIABLES)

    def describe(self, environ: Mapping[str, str], num_replicas: int | None) -> Instance:
        task = read_task(environ)
        require_all(environ, PMIX_VARIABLES, "PMIx")
        if read_whole_number(environ, PMIX_RANK, 0) != task.rank:
            raise EnvironmentMismatchError(
                "the variables of Slurm and of PMIx contradict each other: "
                f"{quote(environ, (*VARIABLES, *PMIX_VARIABLES))}; start the program with `srun --mpi=pmix`"
            )
        return task.instance(num_replicas, f"{SIZE}={task.size}", "slurm")


class SlurmWithoutPMIxEnvironment(Environment):
    """srun without PMIx: a single task is one instance; several cannot find each other and are refused."""

    def is_active(self, environ: Mapping[str, str]) -> bool:
        return is_task(environ)

    def describe(self, environ: Mapping[str, str], num_replicas: int | None) -> Instance:
        task = read_task(environ)
        if task.size > 1:
            raise EnvironmentMismatchError(
                f"srun started {task.size} tasks ({quote(environ, (RANK, SIZE, 'SLURM_MPI_TYPE'))}) without PMIx "
                f"({quote(environ, [PMIX_RANK])}), so each of them would be alone; "
                "start them with `srun --mpi=pmix`, or use poprun without srun"
            )
        return task.instance(num_replicas, f"{SIZE}={task.size}", "slurm")
