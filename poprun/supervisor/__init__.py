"""The supervisor of a job: it starts mpirun, watches the instances, and finds the instance to blame."""
