"""Variables set by Slurm 22.05, recorded on four hosts h0..h3 with two cores each, without unused ones."""

JOB_OF_3 = {
    "SLURM_JOBID": "6",
    "SLURM_JOB_CPUS_PER_NODE": "2,1",
    "SLURM_JOB_ID": "6",
    "SLURM_JOB_NODELIST": "h[0-1]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NODELIST": "h[0-1]",
    "SLURM_NODE_ALIASES": "(null)",
    "SLURM_NPROCS": "3",
    "SLURM_NTASKS": "3",
    "SLURM_TASKS_PER_NODE": "2,1",
}
"""In the shell of `salloc -N2 -n3`."""

FIRST_TASK = {
    "SLURMD_NODENAME": "h0",
    "SLURM_CPUS_ON_NODE": "2",
    "SLURM_GTIDS": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_TASK_PID": "683",
}

BATCH = JOB_OF_3 | FIRST_TASK
"""In the script of `sbatch -N2 -n3`: it looks like the first of three tasks."""

BATCH_WITHOUT_TASKS = {name: value for name, value in BATCH.items() if name not in ("SLURM_NTASKS", "SLURM_NPROCS")} | {
    "SLURM_JOB_CPUS_PER_NODE": "1(x2)",
    "SLURM_TASKS_PER_NODE": "1(x2)",
    "SLURM_CPUS_ON_NODE": "1",
}
"""In the script of `sbatch -N2`."""

INTERACTIVE_STEP = (
    JOB_OF_3
    | FIRST_TASK
    | {
        "SLURM_MPI_TYPE": "none",
        "SLURM_PTY_PORT": "43345",
        "SLURM_STEPID": "4294967290",
        "SLURM_STEP_ID": "4294967290",
        "SLURM_STEP_NODELIST": "h0",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_TASKS_PER_NODE": "1",
    }
)
"""In the shell of `salloc -N2 -n3` where slurm.conf says LaunchParameters=use_interactive_step."""

TASK = {
    "SLURMD_NODENAME": "h1",
    "SLURM_CPUS_ON_NODE": "1",
    "SLURM_GTIDS": "2",
    "SLURM_JOBID": "2",
    "SLURM_JOB_CPUS_PER_NODE": "2,1",
    "SLURM_JOB_ID": "2",
    "SLURM_JOB_NODELIST": "h[0-1]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_NODELIST": "h[0-1]",
    "SLURM_NPROCS": "3",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "h[0-1]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_TASKS_PER_NODE": "2,1",
    "SLURM_TASK_PID": "592",
}
"""In the last task of `srun -N2 -n3`."""

PMIX = {
    "PMIX_GDS_MODULE": "ds21,ds12,hash",
    "PMIX_HOSTNAME": "h1",
    "PMIX_NAMESPACE": "slurm.pmix.2.0",
    "PMIX_RANK": "2",
    "PMIX_SECURITY_MODE": "native",
    "PMIX_SERVER_URI4": "pmix-server.583;tcp4://127.0.0.1:50267",
    "PMIX_VERSION": "4.2.2rc2",
    "SLURM_MPI_TYPE": "pmix",
    "SLURM_PMIX_MAPPING_SERV": "(vector,(0,1,2),(1,1,1))",
}
"""Variables added by `--mpi=pmix`; Open MPI adds none, even from its wheel."""

PMIX_TASK = TASK | PMIX

PMI2_TASK = TASK | {
    "PMI_FD": "11",
    "PMI_JOBID": "2.0",
    "PMI_RANK": "2",
    "PMI_SIZE": "3",
    "SLURM_MPI_TYPE": "pmi2",
}
"""`srun --mpi=pmi2`, which the wheel of Open MPI does not speak."""

ONLY_TASK = {name: {"h[0-1]": "h0", "2,1": "1"}.get(value, value) for name, value in (TASK | FIRST_TASK).items()} | {
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_NNODES": "1",
    "SLURM_NPROCS": "1",
    "SLURM_NTASKS": "1",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
}
"""`srun -n1`."""

ONLY_TASK_OF_LARGER_JOB = ONLY_TASK | {
    "SLURM_JOB_CPUS_PER_NODE": "2(x3)",
    "SLURM_JOB_NODELIST": "h[0-2]",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_NODELIST": "h[0-2]",
}
"""`srun -n1` within `salloc -N3 --ntasks-per-node=2`: some variables are those of the job, some those of the step."""

TERMINAL_TASK = TASK | FIRST_TASK | {"SLURM_GTIDS": "0,1", "SLURM_PTY_PORT": "40001"}
"""`srun -N2 -n3 --pty bash`."""

MPIRUN_RANK = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_NODE_RANK": "0",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "3",
    "PMIX_NAMESPACE": "prterun-h0-849@1",
    "PMIX_RANK": "2",
    "PMIX_VERSION": "5.0.11rc1",
    "PRTE_LAUNCHED": "1",
    "SLURMD_NODENAME": "h1",
    "SLURM_JOB_CPUS_PER_NODE": "2,1",
    "SLURM_JOB_ID": "15",
    "SLURM_JOB_NODELIST": "h[0-1]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "h1",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_TASKS_PER_NODE": "1",
}
"""The last rank of `mpirun -n 3` within `salloc -N2 -n3`: mpirun's daemon is a task of a step of its own."""

SUBMITTED_BY_A_TASK = {
    "PMIX_NAMESPACE": "slurm.pmix.26.0",
    "PMIX_RANK": "1",
    "SLURMD_NODENAME": "h1",
    "SLURM_CPUS_ON_NODE": "1",
    "SLURM_GTIDS": "0",
    "SLURM_JOB_CPUS_PER_NODE": "1",
    "SLURM_JOB_ID": "27",
    "SLURM_JOB_NODELIST": "h1",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_LOCALID": "0",
    "SLURM_MPI_TYPE": "pmix",
    "SLURM_NNODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "h0",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_TASKS_PER_NODE": "1",
}
"""In the script of `sbatch -n1` submitted by a task of `srun -n2 --mpi=pmix`: it inherits the step's variables."""

HETEROGENEOUS_TASK = TASK | {
    "SLURM_HET_SIZE": "2",
    "SLURM_LOCALID": "1",
    "SLURM_GTIDS": "1,2",
    "SLURM_STEP_TASKS_PER_NODE": "1,2",
    "SLURM_TASKS_PER_NODE": "1,2",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "h0",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "h1",
    "PMIX_NAMESPACE": "slurm.pmix.21.0",
    "PMIX_RANK": "2",
}
"""`srun --het-group=0,1 --mpi=pmix` within `salloc -n1 : -N1 -n2`."""

HETEROGENEOUS_SHELL = {
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID": "23",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "h0",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "h1",
    "SLURM_NTASKS": "2",
    "SLURM_TASKS_PER_NODE_HET_GROUP_0": "1",
    "SLURM_TASKS_PER_NODE_HET_GROUP_1": "1",
}
"""In the shell of `salloc -N1 -n1 : -N1 -n1`."""
