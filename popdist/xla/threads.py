"""The size of XLA's CPU thread pool, which has to be the same wherever a replica runs."""

from __future__ import annotations

from collections.abc import Mapping

VARIABLE = "PJRT_NPROC"
SMALLEST_POOL = 8


def thread_pool_size(total_replicas: int) -> int:
    """How many threads XLA's CPU pool has in every instance of a job.

    XLA splits a matrix product by the size of this pool, and how it is split decides the order in which the
    terms are added, hence the last bits of the result. By default the size is max(cores, devices) and so
    depends on the machine and on how many replicas the instance drives. `PJRT_NPROC`, read when JAX starts
    its first backend, fixes it. For the same bits however the replicas are spread it may depend on nothing
    but their total number, and it must not be smaller than the devices of one process.

    Args:
        total_replicas: the replicas of all instances.
    """
    return max(SMALLEST_POOL, total_replicas)


def thread_pool_setting(environ: Mapping[str, str], total_replicas: int) -> dict[str, str]:
    """The variable to set so that the pool has its size; nothing where the user has set it already."""
    if VARIABLE in environ:
        return {}
    return {VARIABLE: str(thread_pool_size(total_replicas))}
