"""The script that turns an instance of mpirun into a worker over gRPC: `worker_script.py DIRECTORY PROGRAM...`.

The workers meet at sockets in the directory, so all of them must run on one machine. The script runs before the program
in Python's isolated mode, and imports only the standard library.
"""

import json
import os
import sys

_OF_LAUNCHERS = ("OMPI_", "PMIX_", "PRTE_")
_OF_POPRUN = (
    "POPDIST_NUM_TOTAL_REPLICAS",
    "POPDIST_NUM_IPUS_PER_REPLICA",
    "POPDIST_NUM_LOCAL_REPLICAS",
    "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE",
    "POPDIST_REPLICA_INDEX_OFFSET",
    "POPDIST_LOCAL_INSTANCE_INDEX",
)


def worker_environment(environ: dict[str, str], directory: str) -> dict[str, str]:
    """Return the environment without the variables of launchers, and with TF_CONFIG."""
    size, rank = int(environ["OMPI_COMM_WORLD_SIZE"]), int(environ["OMPI_COMM_WORLD_RANK"])
    addresses = [f"unix:{directory}/{number}" for number in range(size)]
    config = {
        "cluster": {"worker": addresses},
        "task": {"type": "worker", "index": rank},
        "num_replicas": int(environ[_OF_POPRUN[0]]),
    }
    kept = {
        name: value for name, value in environ.items() if not name.startswith(_OF_LAUNCHERS) and name not in _OF_POPRUN
    }
    return {**kept, "TF_CONFIG": json.dumps(config)}


if __name__ == "__main__":
    os.execvpe(sys.argv[2], sys.argv[2:], worker_environment(dict(os.environ), sys.argv[1]))
