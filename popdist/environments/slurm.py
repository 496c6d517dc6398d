"""Instances started by Slurm's srun: one task of a job step is one instance, and PMIx connects them.

The variables: https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES. Their values under srun, sbatch
and salloc were recorded with Slurm 22.05; see tests/slurm_records.py.
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
"""Variables that srun sets for every task, in the order of messages."""

PMIX_RANK = "PMIX_RANK"
PMIX_VARIABLES = (PMIX_RANK, "PMIX_NAMESPACE")

_SHELL_STEPS = frozenset(("4294967290", "4294967291", "4294967292", "interactive", "batch", "extern"))
"""Step ids of the shell of an allocation (slurm.h: SLURM_INTERACTIVE_STEP, SLURM_BATCH_SCRIPT, ...)."""

_TASKS, _STEP_TASKS = "SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"


def is_task(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this process; false for the shell that sbatch or salloc started.

    A job submitted from inside a step inherits the step's variables. sbatch replaces SLURM_TASKS_PER_NODE, so a
    difference from SLURM_STEP_TASKS_PER_NODE reveals the inheritance.
    """
    if STEP not in environ:
        return environ.get(RANK, "0") != "0"
    is_inherited = _STEP_TASKS in environ and environ.get(_TASKS, environ[_STEP_TASKS]) != environ[_STEP_TASKS]
    return environ[STEP] not in _SHELL_STEPS and not is_inherited


def read_task(environ: Mapping[str, str]) -> LaunchedProcess:
    """Read the task from Slurm's variables.

    Raises:
        EnvironmentMismatchError: The variables are incomplete, not numbers, or contradict each other.
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
    """A task of `srun --mpi=pmix`. The tasks share the replicas evenly; by default there is one per task."""

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
    """A task of srun without PMIx. A single task is one instance; several tasks are refused: nothing connects them."""

    def is_active(self, environ: Mapping[str, str]) -> bool:
        return is_task(environ)

    def describe(self, environ: Mapping[str, str], num_replicas: int | None) -> Instance:
        task = read_task(environ)
        if task.size > 1:
            raise EnvironmentMismatchError(
                f"srun started {task.size} tasks ({quote(environ, (RANK, SIZE, 'SLURM_MPI_TYPE'))}) without PMIx "
                f"({quote(environ, [PMIX_RANK])}), so each task would run alone; "
                "start them with `srun --mpi=pmix`, or use poprun without srun"
            )
        return task.instance(num_replicas, f"{SIZE}={task.size}", "slurm")
