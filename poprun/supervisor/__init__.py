"""The supervisor of a job: it starts mpirun, watches the instances, and names the one to blame."""
