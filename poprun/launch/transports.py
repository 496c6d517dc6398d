"""The transports of Open MPI for a job on one host. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_NETWORKS = ("btl_tcp_if_include", "btl_tcp_if_exclude", "btl")
_TRANSPORTS = ("pml", "mtl", "btl")
_WITHIN_A_HOST = {
    # Without it, Open MPI looks for fabrics through libfabric and UCX before it takes this one.
    "OMPI_MCA_pml": "ob1",
    # Open MPI (5.0.11) sleeps for a second when it closes an unused `btl ofi`.
    "OMPI_MCA_btl": "^ofi,uct",
}


def transport_variables(arguments: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables that leave Open MPI the transports within a host: shared memory and TCP.

    If the user names transports, those are used instead.

    Args:
        arguments: The user's options for mpirun.
        environ: The environment of the user.
    """
    return {} if _names_any(_TRANSPORTS, arguments, environ) else dict(_WITHIN_A_HOST)


def loopback_variables(arguments: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables that keep instances' TCP connections on the loopback interface.

    Instances share memory, and need TCP only to reach processes that they spawn. If the user names networks or
    transports, those are used instead.
    """
    return {} if _names_any(_NETWORKS, arguments, environ) else {"OMPI_MCA_btl_tcp_if_include": "lo"}


def _names_any(parameters: Sequence[str], arguments: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Return whether the user sets a parameter: by an option of mpirun, by `-x OMPI_MCA_...`, or in the environment."""
    words = {word.partition("=")[0] for word in arguments}
    return any(not words.isdisjoint((name, f"OMPI_MCA_{name}")) or f"OMPI_MCA_{name}" in environ for name in parameters)
