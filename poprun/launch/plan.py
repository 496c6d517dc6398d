"""The planning of a launch: all decisions that are made before anything is started.

What only jobs on other hosts or in a batch system need is loaded for them, because it delays every launch otherwise.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from popdist.instance import this_host
from popdist.xla import thread_pool_setting
from poprun.cli.log import Log
from poprun.cli.settings import LaunchSettings
from poprun.errors import PopRunError, UsageError
from poprun.hosts.hosts import Host, check_hosts, parse_hostfile, parse_hosts, recognise_this_machine, shares_of
from poprun.hosts.this_machine import Core, is_this_machine, usable_cores
from poprun.launch.launch import Launch
from poprun.launch.placement import device_ids, place_instances
from poprun.launch.program import (
    check_descriptors,
    check_program,
    check_user,
    check_working_directory,
    find_mpirun,
    home_variables,
)
from poprun.launch.transports import loopback_variables, transport_variables
from poprun.launch.variables import extra_variables, meeting_point, sums_setting

TYPE_CHECKING = False  # replaces `typing.TYPE_CHECKING`: `typing` takes too long to load before mpirun starts
if TYPE_CHECKING:
    from poprun.hosts.remote import Remote
    from poprun.hosts.schedulers.scheduler import Allocation

FORWARDED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH")
RESERVING = (
    *("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "PBS_NODEFILE", "LSB_MCPU_HOSTS", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE"),
    *("FLUX_URI", "K_MPI_JOB_ROLE", "SKYPILOT_NODE_IPS"),
    *("PRTE_MCA_prte_default_hostfile", "OMPI_MCA_orte_default_hostfile"),
)
"""The variables of all schedulers; without any of them, the schedulers are not loaded."""


def plan_launch(
    settings: LaunchSettings, environ: Mapping[str, str], log: Log | None = None, hosts: Sequence[Host] = ()
) -> Launch:
    """Decide everything about a launch; nothing is started.

    Other hosts are prepared as the user asks, and then asked for their facts. A dry run does neither, and assumes
    that unknown hosts are like this machine.

    Args:
        settings: The options of the user.
        environ: The environment of the user.
        log: The log for events on other hosts. None: only faults are logged.
        hosts: The remaining hosts of an earlier launch, which are prepared already. Empty: as the settings say.

    Raises:
        PopRunError: Hosts or partition do not fit the job, or mpirun or the program cannot be found.
    """
    allocation = _allocation(settings, environ)
    is_prepared = bool(hosts)
    hosts = tuple(hosts) or _choose_hosts(settings, allocation)
    shares, spares = _shares(hosts, settings)
    processes = tuple(map(sum, zip(shares, spares, strict=True)))
    if allocation is not None:
        from poprun.hosts.allocation import describe_use

        if said := describe_use(allocation, hosts, settings, processes):
            (log or Log()).info(said)
    is_here = [host.is_this_machine for host in hosts]
    mpirun = find_mpirun(sys.executable, environ)
    check_working_directory()
    check_descriptors(sum(count for count, here in zip(processes, is_here, strict=True) if here))
    if any(is_here):  # other hosts have their own copy of the program
        check_program(settings.program[0], environ)
    devices = () if settings.vipu_partition is None else device_ids(settings)
    if not settings.dry_run:
        check_user(settings, os.geteuid(), environ)  # not before: the message is of no use if a word is wrong
    cores: dict[str, Sequence[Core]] = dict.fromkeys((host.name for host in hosts), usable_cores())
    known = {host.name: cores[host.name] for host in hosts if host.is_this_machine}
    names = tuple(name for name in FORWARDED if name in environ)
    remote = None
    if not all(is_here):
        from poprun.hosts.remote import forwarded_names

        if allocation is not None and allocation.shell:
            _refuse_ssh(settings, allocation)
        if not is_prepared:
            prepare_hosts(hosts, settings, environ, log or Log())
        remote, found = find_remote(hosts, settings, mpirun, allocation, environ)
        known |= found
        cores |= found
        names += tuple(name for name in forwarded_names(environ) if name not in names)
    sums = sums_setting(settings, environ)
    here = remote.address if remote is not None else ""
    given = thread_pool_setting(environ, settings.num_replicas)
    given |= meeting_point(hosts, here, is_dry_run=settings.dry_run)
    return Launch(
        settings=settings,
        hosts=hosts,
        places=place_instances(settings, [host.name for host in hosts], cores, devices, shares, spares),
        mpirun=mpirun,
        python=sys.executable,
        extra=extra_variables(settings, given, environ) | sums,
        forwarded=tuple(name for name in names if name not in sums),
        oversubscribes=any(each > len(cores[host.name]) for host, each in zip(hosts, processes, strict=True)),
        remote=remote,
        mpirun_variables=home_variables(environ)
        | dict(allocation.variables if allocation is not None else ())
        | (transport_variables(settings.mpi.words, environ) if len(hosts) == 1 else {})
        | (loopback_variables(settings.mpi.words, environ) if remote is None else {}),
        cores={host: len(each) for host, each in known.items()},
    )


def _shares(hosts: Sequence[Host], settings: LaunchSettings) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the numbers of instances and of spares on each host.

    Raises:
        UsageError: They cannot be divided over the hosts.
    """
    if settings.spares:
        from poprun.hosts.spares import share_hosts

        return share_hosts(hosts, settings)
    check_hosts(hosts, settings)
    return shares_of(hosts, settings.num_instances), (0,) * len(hosts)


def find_hosts(settings: LaunchSettings) -> tuple[Host, ...]:
    """Return the hosts that the user names, or this machine without any.

    Raises:
        UsageError: The hosts cannot be read or understood, or contradict each other.
    """
    if not settings.host and settings.hostfile is None:
        return (Host(this_host(), is_this_machine=True),)
    if settings.hostfile is not None:
        hosts = parse_hostfile(_read(settings.hostfile, "hostfile"), settings.hostfile)
    else:
        hosts = parse_hosts(settings.host)
    return _recognise(hosts)


def available_hosts(settings: LaunchSettings, environ: Mapping[str, str]) -> tuple[Host, ...]:
    """Return the hosts that a job may use; a batch system may have reserved more than the job uses.

    Raises:
        UsageError: The hosts cannot be read or understood, or contradict each other.
    """
    allocation = _allocation(settings, environ)
    return find_hosts(settings) if allocation is None else _recognise(allocation.hosts)


def prepare_hosts(hosts: Sequence[Host], settings: LaunchSettings, environ: Mapping[str, str], log: Log) -> None:
    """Prepare the other hosts as the user asks (ssh key, Python environment); a dry run does nothing.

    Raises:
        PopRunError: Hosts cannot be prepared; one line for each.
    """
    others = [host.name for host in hosts if not host.is_this_machine]
    if settings.distribute_ssh_key and not settings.dry_run:
        from poprun.hosts.ssh_keys import distribute_key

        distribute_key(others, environ, log)
    if settings.synchronise_python_venv and not settings.dry_run:
        from poprun.hosts.python_environment import this_environment
        from poprun.hosts.synchronise import synchronise

        synchronise(others, this_environment(), environ, log)


def find_remote(
    hosts: Sequence[Host],
    settings: LaunchSettings,
    mpirun: str,
    allocation: Allocation | None,
    environ: Mapping[str, str],
) -> tuple[Remote, dict[str, Sequence[Core]]]:
    """Find the way to the other hosts, and their cores.

    Raises:
        PopRunError: A host does not fit the job; one line for each fault.
    """
    from poprun.hosts.host_facts import question_about
    from poprun.hosts.inspection import Inspection, guess_network, inspect_hosts
    from poprun.hosts.interfaces import HostNetwork, parse_mask
    from poprun.hosts.remote import Remote, need_domains, ssh_options
    from poprun.hosts.ssh import SRUN, ssh_words

    if " " in mpirun and not settings.dry_run:
        raise PopRunError(
            f"{mpirun} has a space in its path, and Open MPI cannot start its daemons on other hosts from there; "
            "create the environment in a folder without a space"
        )
    shell = allocation.shell if allocation is not None else ()
    starting_s = settings.start_timeout_s if allocation is not None and allocation.may_be_starting else 0.0
    cores: dict[str, Sequence[Core]] = {}
    kernel_names: dict[str, str] = {host.name: this_host() for host in hosts if host.is_this_machine}
    warnings: tuple[str, ...] = ()
    if settings.host_subnet is not None:
        parse_mask(settings.host_subnet)  # a dry run too refuses a text that cannot be a network
    if settings.dry_run or settings.skip_checks:
        network = HostNetwork("", "", "")
        with suppress(PopRunError) if settings.dry_run else nullcontext():
            network = guess_network([host.name for host in hosts], settings.host_subnet, environ)
    else:
        question = question_about(settings.program[0], mpirun, environ)
        shares, spares = _shares(hosts, settings)
        instances = {host.name: sum(each) for host, *each in zip(hosts, shares, spares, strict=True)}
        inspected = inspect_hosts(Inspection(instances, question, settings.host_subnet, shell, starting_s), environ)
        cores = {host: facts.cores for host, facts in inspected.facts.items()}
        kernel_names |= {host: facts.name for host, facts in inspected.facts.items()}
        network, warnings = inspected.network, inspected.warnings
    remote = Remote(
        network=network.cidr,
        address=network.address,
        ssh=ssh_options(environ),
        silence_s=settings.host_timeout_s,
        shell=shell or ssh_words(environ),
        warnings=warnings,
        names=kernel_names,
        keeps_domains=need_domains(_names_of_machines(hosts, kernel_names)),
        daemon=_daemon_of_slurm(mpirun) if shell[:1] == SRUN[:1] else (),
    )
    return remote, cores


def _daemon_of_slurm(mpirun: str) -> tuple[str, ...]:
    """Return the words of the daemon that ignores Slurm's warning signals; empty if Open MPI's daemon is not found."""
    words = (
        sys.executable,
        "-I",
        "-S",
        str(Path(__file__).parents[1] / "hosts" / "slurm_daemon.py"),
        str(Path(mpirun).with_name("prted")),
    )
    return words if Path(words[-1]).is_file() and not any(" " in word for word in words) else ()


def _names_of_machines(hosts: Sequence[Host], kernel_names: Mapping[str, str]) -> list[list[str]]:
    """Return all names of each machine that takes part; this machine takes part, because mpirun runs on it."""
    here = [] if any(host.is_this_machine for host in hosts) else [[this_host()]]
    return [*([host.name, kernel_names.get(host.name, host.name)] for host in hosts), *here]


def _allocation(settings: LaunchSettings, environ: Mapping[str, str]) -> Allocation | None:
    """Return the allocation of a batch system; None if the user names hosts, or none are reserved."""
    if settings.host or settings.hostfile is not None or environ.keys().isdisjoint(RESERVING):
        return None
    from poprun.hosts.allocation import find_allocation

    return find_allocation(environ)


def _choose_hosts(settings: LaunchSettings, allocation: Allocation | None) -> tuple[Host, ...]:
    if allocation is None:
        return find_hosts(settings)
    from poprun.hosts.allocation import choose_hosts

    chosen = choose_hosts(allocation, settings.num_instances, settings.num_replicas).hosts
    if settings.spares:
        from poprun.hosts.spares import add_hosts

        chosen = add_hosts(chosen, allocation.hosts, settings)
    return _recognise(chosen)


def _refuse_ssh(settings: LaunchSettings, allocation: Allocation) -> None:
    """Refuse options that need ssh, if a batch system's command reaches the hosts: they may refuse logins."""
    from poprun.hosts.schedulers.scheduler import NAME_HOSTS

    wanted = {
        "--synchronise-python-venv": settings.synchronise_python_venv,
        "--distribute-ssh-key": settings.distribute_ssh_key,
    }
    for option in (name for name, is_wanted in wanted.items() if is_wanted):
        raise UsageError(
            f"{option} works by ssh, but poprun reaches the hosts of {allocation.source} by {allocation.shell[0]}, and "
            f"they may refuse ssh; leave it out, or, if `ssh HOST true` works there, {NAME_HOSTS}"
        )


def _recognise(hosts: Sequence[Host]) -> tuple[Host, ...]:
    return recognise_this_machine(hosts, is_this_machine)


def _read(path: str, what: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{what} {path} cannot be read: {error.strerror}; check the path") from None
    except UnicodeDecodeError:
        raise UsageError(f"{what} {path} is not a text file; check the path") from None
