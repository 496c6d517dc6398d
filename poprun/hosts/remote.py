"""The words for mpirun and ssh of a job that runs on other hosts too. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from poprun.hosts.ssh import user_arguments
from poprun.hosts.this_machine import short_name
from poprun.ipc.sockets import probing_times

SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-o", "LogLevel=ERROR")

FORWARDED_FAMILIES = (
    "CUDA_",
    "HOROVOD_",
    "JAX_",
    "LC_",
    "MKL_",
    "NCCL_",
    "NVIDIA_",
    "OMP_",
    "OPENBLAS_",
    "PJRT_",
    "POPDIST_",
    "POPLAR_",
    "TF_",
    "UCX_",
    "XLA_",
)
FORWARDED_NAMES = ("LANG", "OPAL_PREFIX", "PYTHONHASHSEED", "PYTHONUNBUFFERED", "PYTHONWARNINGS", "VIRTUAL_ENV")
DAEMONS_LATER_S = 3.0
"""So much longer than poprun and the agents daemons bear with a silent host, at least: poprun then says who is lost,
where a daemon that comes first only ends mpirun."""
DAEMONS_ASK_S = 1
"""Daemons have nothing to say to each other, so the last word may be as old as this when a host falls silent."""
_OF_THIS_MACHINE = frozenset(("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"))


@dataclass(frozen=True)
class Remote:
    """The way to the other hosts.

    Attributes:
        network: the network in which all hosts talk, such as `10.0.0.0/24`; "" where a dry run cannot know it.
        address: this machine's address there.
        ssh: options for ssh.
        silence_s: after which silence a host counts as gone.
        shell: the words before a host that run a command on it: those of ssh, or of what takes its place.
        warnings: what the hosts said that the user should know.
        names: for each host that has answered, as the user wrote it, its name as its kernel knows it.
        keeps_domains: whether Open MPI has to look at whole names, see `need_domains`.
        daemon: the words that start Open MPI's daemon on a host, without blanks in them; empty: its own choice.
    """

    network: str
    address: str
    ssh: tuple[str, ...]
    silence_s: float
    shell: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    keeps_domains: bool = False
    daemon: tuple[str, ...] = ()


def need_domains(machines: Iterable[Iterable[str]]) -> bool:
    """Whether two machines have names that agree up to the first dot; what follows is nothing to Open MPI by itself.

    Args:
        machines: the names of each.
    """
    shortened = [{short_name(name) for name in names} for names in machines]
    return sum(map(len, shortened)) > len(set().union(*shortened))


def ssh_options(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the options for Open MPI's ssh: what the user says first, since ssh takes the first value of each."""
    return (*user_arguments(environ), *SSH_OPTIONS)


def mpirun_options(remote: Remote, user: Sequence[str]) -> list[str]:
    """Return the options for mpirun; a parameter that the user's own options mention is left to the user.

    Daemons and data use one network. A daemon that hears nothing ends itself and its instances, as poprun does on its
    side.
    """
    import shlex

    first_s, interval_s, probes = probing_times(remote.silence_s + DAEMONS_LATER_S + DAEMONS_ASK_S, DAEMONS_ASK_S)
    parameters = (
        ("--prtemca", "plm_ssh_args", shlex.join(remote.ssh)),
        # Daemons that start each other hand these options on cut off at the first equals sign (PRRTE 3.0.14).
        ("--prtemca", "plm_ssh_no_tree_spawn", "1"),
        ("--prtemca", "prte_if_include", remote.network),
        ("--mca", "btl_tcp_if_include", remote.network),
        ("--prtemca", "oob_tcp_keepalive_time", str(first_s)),
        ("--prtemca", "oob_tcp_keepalive_intvl", str(interval_s)),
        ("--prtemca", "oob_tcp_keepalive_probes", str(probes)),
        ("--prtemca", "prte_launch_agent", " ".join(remote.daemon)),
        ("--prtemca", "prte_keep_fqdn_hostnames", "1" if remote.keeps_domains else ""),
        ("--pmixmca", "pmix_keep_fqdn_hostnames", "1" if remote.keeps_domains else ""),
    )
    return [word for kind, name, value in parameters if value and name not in user for word in (kind, name, value)]


def forwarded_names(environ: Iterable[str]) -> tuple[str, ...]:
    """Return the variables that instances on other hosts get as well; there, nothing is inherited."""
    return tuple(
        sorted(
            name
            for name in environ
            if name not in _OF_THIS_MACHINE and (name in FORWARDED_NAMES or name.startswith(FORWARDED_FAMILIES))
        )
    )
