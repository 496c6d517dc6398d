"""The options of mpirun and ssh for a job that runs on other hosts too. Pure."""

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
    "MASTER_",
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
"""The daemons' limit for a silent host exceeds that of poprun and the agents by at least this time. poprun then reports
which host is lost; a daemon that gave up first would end mpirun without a reason."""
DAEMONS_ASK_S = 1
"""The interval of the daemons' probes: daemons are quiet, so a host's last word may be this old when it fails."""
_OF_THIS_MACHINE = frozenset(("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"))


@dataclass(frozen=True)
class Remote:
    """The way to the other hosts of a job.

    Attributes:
        network: The network that connects all hosts, such as `10.0.0.0/24`. Empty in a dry run that cannot know it.
        address: This machine's address in the network.
        ssh: Options for ssh.
        silence_s: Seconds of silence after which a host counts as lost.
        shell: The words before a host that run a command there: those of ssh or of its replacement.
        warnings: Messages about the hosts for the user.
        names: The name that each host's kernel has, under the name that the user wrote; only hosts that answered.
        keeps_domains: Whether Open MPI has to compare whole names; `need_domains` decides.
        daemon: The words that start Open MPI's daemon on a host, without blanks in them. Empty: Open MPI's default.
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
    """Return whether two machines have equal names up to the first dot; by default, Open MPI ignores the rest.

    Args:
        machines: The names of each machine.
    """
    shortened = [{short_name(name) for name in names} for names in machines]
    return sum(map(len, shortened)) > len(set().union(*shortened))


def ssh_options(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the options for Open MPI's ssh: the user's first, because ssh uses the first value of an option."""
    return (*user_arguments(environ), *SSH_OPTIONS)


def mpirun_options(remote: Remote, user: Sequence[str]) -> list[str]:
    """Return the options for mpirun. A parameter that the user's own options mention is left to the user.

    Daemons and data use one network. A daemon that hears nothing ends itself and its instances, as poprun does too.
    """
    import shlex

    first_s, interval_s, probes = probing_times(remote.silence_s + DAEMONS_LATER_S + DAEMONS_ASK_S, DAEMONS_ASK_S)
    parameters = (
        ("--prtemca", "plm_ssh_args", shlex.join(remote.ssh)),
        # Daemons that start each other cut these options off at the first equals sign (PRRTE 3.0.14).
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
    """Return the variables that instances on other hosts get too, because nothing is inherited there."""
    return tuple(
        sorted(
            name
            for name in environ
            if name not in _OF_THIS_MACHINE and (name in FORWARDED_NAMES or name.startswith(FORWARDED_FAMILIES))
        )
    )
