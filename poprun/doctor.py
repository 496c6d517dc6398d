"""`poprun doctor`: a table of everything that a job on several hosts depends on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec

from popdist.instance import this_host
from popdist.xla import (
    FLAGS_VARIABLE,
    OVERRULE,
    WITHOUT_SUMS,
    adds_up_wrongly,
    complain_of_sums,
    is_measured,
    is_overruled,
    right_sums_setting,
)
from poprun.cli.log import show
from poprun.cli.options import Option, OptionKind
from poprun.cli.subcommand import Subcommand
from poprun.cli.wording import columns_of, count, draw_rows
from poprun.errors import PopRunError, UsageError
from poprun.hosts.allocation import find_allocation
from poprun.hosts.host_checks import Finding, HostNeeds, findings_of
from poprun.hosts.host_facts import HostFacts, HostFault, question_about
from poprun.hosts.hosts import parse_hosts
from poprun.hosts.inspection import LET_PASS, addresses_in, find_network, with_this_machine
from poprun.hosts.interfaces import HostNetwork
from poprun.hosts.links import Blocked, HelperError, KnownAddresses, find_blocked, look_up_names
from poprun.hosts.ssh import by_hand, ssh_words, user_arguments
from poprun.hosts.survey import limit_from, survey
from poprun.hosts.this_machine import is_this_machine
from poprun.launch.program import find_mpirun

_of_doctor = partial(Option, section="Doctor")
DOCTOR = Subcommand(
    "usage: poprun doctor [--host HOST[,HOST...]] [--host-subnet INTERFACE|MASK] [--json]",
    "Examines everything that a job on the hosts depends on, and starts nothing. Without --host, it examines the hosts "
    "of the batch system's job, or this machine.",
    (
        _of_doctor("help", OptionKind.FLAG, "print this and stop", spellings=("-h",)),
        _of_doctor("host", OptionKind.HOSTS, "the hosts, e.g. 'node[0-2,4]'", spellings=("-H",)),
        _of_doctor("host-subnet", OptionKind.TEXT, "the interface or network that connects the hosts"),
        _of_doctor("json", OptionKind.FLAG, "print JSON instead of a table"),
    ),
)

_COLUMNS = ("", "check", "host", "result", "way out")


@dataclass(frozen=True)
class DoctorRequest:
    """The words after `poprun doctor`.

    Attributes:
        hosts: Names of hosts, as the user wrote them. Empty: this machine.
        host_subnet: Name of an interface, or an address mask. None: the network is found from the routes.
        as_json: Whether to print JSON instead of a table.
    """

    hosts: tuple[str, ...] = ()
    host_subnet: str | None = None
    as_json: bool = False


@dataclass(frozen=True)
class DoctorReport:
    """The findings of `poprun doctor`.

    Attributes:
        findings: The rows of the table.
        network: The network that connects the hosts. None with a single host, or if they share no network.
    """

    findings: tuple[Finding, ...]
    network: HostNetwork | None = None

    @property
    def is_well(self) -> bool:
        """Whether a job can run; advice does not count as a fault."""
        return not any(each.is_fault for each in self.findings)

    def as_json(self) -> str:
        """Return the whole report as JSON."""
        return json.dumps({"ok": self.is_well, **asdict(self)}, indent=2)


def main(words: Sequence[str]) -> int:
    """Run `poprun doctor`.

    Returns:
        The exit status: 0 if a job can run, 1 if not.

    Raises:
        UsageError: The words are wrong.
    """
    asked = read_words(words)
    report = examine(asked, os.environ)
    show(report.as_json() if asked.as_json else draw_table(report.findings, columns_of(os.environ)))
    return 0 if report.is_well else 1


def read_words(words: Sequence[str]) -> DoctorRequest:
    """Read the words after `doctor`; several `--host` options add up.

    Raises:
        UsageError: A word is unknown, or a value is missing or wrong.
    """
    values, others = DOCTOR.read(words)
    if others:
        raise UsageError(f"poprun doctor takes options only, not {others[0]!r}; {DOCTOR.usage}")
    hosts, subnet = values.get("host", ()), values.get("host-subnet")
    names = tuple(host.name for host in parse_hosts(hosts)) if isinstance(hosts, tuple) else ()
    return DoctorRequest(names, None if subnet is None else str(subnet), bool(values.get("json")))


def examine(asked: DoctorRequest, environ: Mapping[str, str]) -> DoctorReport:
    """Examine the hosts and their network.

    Args:
        asked: The hosts and the network.
        environ: Environment variables; POPRUN_SSH_ARGS and POPRUN_CHECK_TIMEOUT_S are read.

    Raises:
        UsageError: This machine has no interface or network `host_subnet`.
    """
    allocation = None if asked.hosts else find_allocation(environ)
    hosts = asked.hosts or (tuple(host.name for host in allocation.hosts) if allocation else (this_host(),))
    ssh = allocation.shell if allocation is not None and allocation.shell else ssh_words(environ)
    mpirun, finding = _find_mpirun(environ)
    question = question_about(sys.executable, mpirun, environ)
    facts = survey(with_this_machine(hosts), question, ssh, limit_from(environ))
    here = next(each for host, each in facts.items() if is_this_machine(host))
    findings = [finding, *_check_path(mpirun, hosts), *(_check_ssh(environ) if ssh[0] == "ssh" else ())]
    if allocation is not None:
        findings.append(Finding("hosts", here.host, f"the hosts of {allocation.source}, asked by {ssh[0]}"))
        findings += _check_warning(environ, here.host)
    if isinstance(here, HostFault):
        return DoctorReport((*findings, Finding("this machine", here.host, here.fact, here.way_out, is_fault=True)))
    good = {host: each for host in hosts if isinstance(each := facts[host], HostFacts)}
    network, reason = _find_network(good, here, asked)
    wanted = HostNeeds(here, sys.executable, dict.fromkeys(hosts, 0), network)
    findings += [*reason, *findings_of({host: facts[host] for host in hosts}, wanted)]
    findings += [*check_load(good), *check_sums(good, environ), *check_kernel(here.host), *check_mtu(good, network)]
    python, limit_s = sys.executable, limit_from(environ)
    if len(good) > 1:
        names = [each.name for each in good.values()]
        findings += check_names(look_up_names(list(good), names, python, ssh, limit_s), good, ssh)
    if network is not None:
        everyone = {host: each for host, each in facts.items() if isinstance(each, HostFacts)}
        reached = addresses_in(network, everyone)
        findings += check_connections(len(reached), find_blocked(reached, python, ssh, limit_s))
    checks = list(dict.fromkeys(each.check for each in findings))  # rows of one check follow each other
    return DoctorReport(tuple(sorted(findings, key=lambda each: checks.index(each.check))), network)


def check_names(
    known: Mapping[str, KnownAddresses | HelperError], facts: Mapping[str, HostFacts], ssh: Sequence[str] = ("ssh",)
) -> Iterator[Finding]:
    """Report whether each host knows the addresses of all hosts' names."""
    for host, found in known.items():
        if isinstance(found, HelperError):
            yield Finding("name service", host, str(found), f"try `{by_hand(ssh, host, 'true')}`", is_fault=True)
            continue
        others = [each.name for each in facts.values() if not {*found.get(each.name, ())} & _own_addresses(each)]
        if others:
            fact = f"has no address, or a different one, for {', '.join(others)}"
            yield Finding(
                "name service", host, fact, "give each name the same addresses on all hosts (/etc/hosts, DNS)"
            )
        else:
            yield Finding("name service", host, "knows all hosts")


def check_mtu(facts: Mapping[str, HostFacts], network: HostNetwork | None) -> Iterator[Finding]:
    """Report hosts whose packet size (MTU) in the chosen network differs from most hosts'."""
    if network is None:
        return
    found = {
        host: next((own.mtu for own in each.interfaces if network.includes(own.address)), 0)
        for host, each in facts.items()
    }
    sizes = Counter(mtu for mtu in found.values() if mtu)
    if len(sizes) < 2:
        return
    usual = sizes.most_common(1)[0][0]
    for host, mtu in found.items():
        if mtu and mtu != usual:
            fact = f"packets of {mtu} bytes, {usual} on most hosts"
            yield Finding("MTU", host, fact, "long messages may hang; set the same MTU on all hosts and switches")


def check_load(facts: Mapping[str, HostFacts]) -> Iterator[Finding]:
    """Report the load of each host, and advise against a busy one.

    The checks before a launch leave this out, because an earlier job of the same user may still raise the load.
    """
    for host, each in facts.items():
        fact, is_busy = f"load {each.load:.1f}", each.load > 2 * len(each.cores)
        yield Finding("load", host, fact, "others compute there; use fewer instances or other hosts" if is_busy else "")


def check_sums(facts: Mapping[str, HostFacts], environ: Mapping[str, str]) -> Iterator[Finding]:
    """Report whether jaxlib computes right sums on the CPUs of each host, and what strategies do if it does not."""
    flags = {name: environ[name] for name in (FLAGS_VARIABLE, OVERRULE) if name in environ}
    for host, each in facts.items():
        version = each.versions.get("jaxlib", "")
        complaint = complain_of_sums(version, flags | right_sums_setting(version, flags))
        if not version:
            continue
        if not adds_up_wrongly(version):
            yield Finding("sums", host, f"jaxlib {version} computes right sums")
        elif is_overruled(flags):
            fact = f"jaxlib {version} computes wrong sums on CPUs if it passes them to YNNPACK, and {OVERRULE} is 1"
            yield Finding("sums", host, fact, f"remove {OVERRULE} from the environment")
        elif complaint is not None:
            yield Finding("sums", host, *_split(complaint), is_fault=True)
        elif complain_of_sums(version, flags) is None:
            yield Finding("sums", host, f"jaxlib {version} computes right sums with the flags in {FLAGS_VARIABLE}")
        else:
            known = "computes wrong sums" if is_measured(version) else "is newer than the measured versions"
            fact = f"jaxlib {version} {known} without {WITHOUT_SUMS}, which strategies and poprun set"
            yield Finding("sums", host, fact, f"for other JAX programs, put it into {FLAGS_VARIABLE}")


def check_kernel(host: str) -> Iterator[Finding]:
    """Report whether this machine has the native kernel of the exchange."""
    if find_spec("collectives.native._kernel") is not None:
        yield Finding("kernel", host, "the native kernel of the exchange is installed")
    else:
        fact = "the native kernel of the exchange was not built; NumPy does its work, more slowly"
        yield Finding("kernel", host, fact, "install a C compiler and the headers of Python, then the project again")


def check_connections(hosts: int, blocked: Sequence[Blocked]) -> Iterator[Finding]:
    """Report whether every host, this machine included, can connect to every other host."""
    for each in blocked:
        yield Finding("connections", each.target, each.fact, LET_PASS, is_fault=True)
    if hosts > 1 and not blocked:
        yield Finding("connections", "all", f"each of {count(hosts, 'host')} reaches every other one by TCP")


def draw_table(findings: Sequence[Finding], columns: int | None = None) -> str:
    """Return the findings as a table with aligned columns and a last line with the number of faults.

    Hosts with the same result share a row.

    Args:
        findings: The results of the checks.
        columns: The width of the page. If the table is wider, each way out stands below its result. None: no limit.
    """
    rows = [_COLUMNS, *((_state(each), each.check, each.host, each.fact, each.way_out) for each in _folded(findings))]
    table = draw_rows(rows)
    if columns is not None and max(map(len, table.splitlines())) > columns:
        heading = (*_COLUMNS[:3], "result -> way out")
        table = draw_rows([heading, *(row for each in rows[1:] for row in _in_two(each))], columns)
    faults = sum(each.is_fault for each in findings)
    return "\n".join([table, "", count(faults, "fault")])


def _in_two(row: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Split a row into a row of four columns and, if there is a way out, a second row for it."""
    *first, way_out = row
    return [tuple(first), *([("", "", "", f"-> {way_out}")] if way_out else [])]


def _folded(findings: Sequence[Finding]) -> list[Finding]:
    hosts: dict[Finding, list[str]] = {}
    for each in findings:
        hosts.setdefault(replace(each, host=""), []).append(each.host)
    return [replace(each, host=",".join(dict.fromkeys(names))) for each, names in hosts.items()]


def _state(finding: Finding) -> str:
    return "FAULT" if finding.is_fault else "hint" if finding.is_advice else "ok"


def _find_network(
    facts: Mapping[str, HostFacts], here: HostFacts, asked: DoctorRequest
) -> tuple[HostNetwork | None, tuple[Finding, ...]]:
    """Return the network of the hosts, or a finding that says why none was found; a single host needs none."""
    if len(facts) < 2 and not asked.host_subnet:
        return None, ()
    try:
        return find_network(facts, here, asked.host_subnet), ()
    except UsageError:
        raise
    except PopRunError as error:
        return None, (Finding("network", here.host, *_split(str(error)), is_fault=True),)


def _own_addresses(facts: HostFacts) -> set[str]:
    return {each.address for each in facts.interfaces} | {"127.0.1.1"}  # Debian's address for a machine's own name


def _find_mpirun(environ: Mapping[str, str]) -> tuple[str, Finding]:
    try:
        mpirun = find_mpirun(sys.executable, environ)
    except PopRunError as error:
        return "mpirun", Finding("mpirun", this_host(), *_split(str(error)), is_fault=True)
    return mpirun, Finding("mpirun", this_host(), mpirun)


def _check_path(mpirun: str, hosts: Sequence[str]) -> Iterator[Finding]:
    """Report an mpirun in a path with a space: Open MPI cannot start its daemons on other hosts from there."""
    if " " in mpirun and not all(map(is_this_machine, hosts)):
        fact = f"{mpirun} has a space in its path, and Open MPI cannot start its daemons on other hosts from there"
        yield Finding("mpirun", this_host(), fact, "create the environment in a folder without a space", is_fault=True)


def _check_warning(environ: Mapping[str, str], here: str) -> Iterator[Finding]:
    """Explain how to ask Slurm for a signal before the end of the job; the job cannot see whether this was done."""
    if "SLURM_JOB_ID" in environ:
        fact = "to warn poprun before the end of the job, use `sbatch --signal=B:USR1@60` and `exec poprun ...`"
        yield Finding("signals", here, f"{fact}; without `B:`, only instances on hosts other than poprun's get it")


def _check_ssh(environ: Mapping[str, str]) -> Iterator[Finding]:
    path = shutil.which("ssh", path=environ.get("PATH"))
    if path is None:
        way_out = "install an ssh client (openssh-client)"
        yield Finding("ssh client", this_host(), "no ssh in PATH; a job on several hosts needs it", way_out)
        return
    extra = " ".join(user_arguments(environ))
    yield Finding("ssh client", this_host(), f"{path} {extra}".rstrip())
    yield Finding("ssh agent", this_host(), _describe_agent(environ))


def _describe_agent(environ: Mapping[str, str]) -> str:
    """Describe the ssh agent; a missing agent is no fault, because keys without a passphrase need none."""
    if not environ.get("SSH_AUTH_SOCK"):
        return "none found; only keys with a passphrase need one"
    try:
        ended = subprocess.run(["ssh-add", "-l"], capture_output=True, text=True, timeout=2, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "does not answer"
    if ended.returncode > 1:
        return "does not answer"
    return f"holds {count(0 if ended.returncode else len(ended.stdout.splitlines()), 'key')}"


def _split(message: str) -> tuple[str, str]:
    fact, _, way_out = message.partition("; ")
    return fact, way_out
