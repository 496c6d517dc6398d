"""How the benchmarks set up Horovod."""

HOROVOD_SCRIPT = "sh launch_scripts/install_horovod.sh"

# Horovod's thread waits for messages inside MPI, which does not yield by default: it takes up to half of the core from
# the thread that computes, and 1-2 % with the first setting. Then it may look for work every 0.2 ms, not every 1 ms.
TUNED = {"OMPI_MCA_mpi_yield_when_idle": "1", "HOROVOD_CYCLE_TIME": "0.2"}
