"""What the user asked for, checked."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from popdist.environments.environment import nearest_multiples
from popdist.records.metric_words import RUN_VARIABLE, parse_words
from popdist.timeline.profiles import WantedProfile
from poprun.cli.command_line import CommandLine, Value, read_fault, read_instance_arguments
from poprun.cli.options import OPTIONS
from poprun.cli.summary_setting import read_summary
from poprun.cli.vipu import LARGEST_DOMAIN_IPUS, PARTITION_VARIABLE
from poprun.cli.wording import count
from poprun.errors import UsageError

_POSITIVE = (
    "num_replicas",
    "num_instances",
    "ipus_per_replica",
    "num_ilds",
    "start_timeout_s",
    "host_timeout_s",
    "min_instances",
)

_OPTION_AND_MORE = re.compile(r"-[^\s=]*\s+\S")


@dataclass(frozen=True)
class Settings:
    """The settings of one launch.

    Attributes:
        program: the program and its arguments.
        host: lists of hosts as they were written; empty: see `hostfile`.
        hostfile: a file that lists the hosts; None: this machine.
        host_subnet: the interface or network that hosts use; None: chosen by poprun.
        num_replicas: replicas of all instances together.
        num_instances: processes.
        ipus_per_replica: devices that one replica spans.
        num_ilds: IPU-Link domains; None: as many as the simulated partition needs, 1 without one.
        verbosity: 0, 1 (`-v`) or 2 (`-vv`).
        debug: say everything.
        print_topology: show the table.
        dry_run: print the command, run nothing.
        json: print it as JSON.
        only_output_from: the instance whose output is shown; None: all.
        no_tags: show lines without anything that names the instance.
        tag_host: show the host in front of each line.
        timestamps: show the time in front of each line.
        output_dir: directory that gets each instance's output too.
        metrics: where the metrics of every step go, as it was written.
        metrics_run: a name of this job that no other has, for services; the same when it is started again.
        timeline: the file that gets what instances did; None: nothing is recorded.
        timeline_limit: MB that one of them may record; None: the usual.
        profile: which profiler sees which of their steps, as `popdist.timeline.profiles` has it; None: none.
        summary: what is said when the job is over: `yes`, `no`, `json:FILE`; "": as usual.
        top_address: where those who know the job's token may look at it, `HOST:PORT`; None: on this machine only.
        executable_cache_path: what programs find in POPDIST_EXECUTABLE_CACHE_PATH.
        mpi_global_args: options for mpirun.
        mpi_local_args: options for mpirun, for each instance.
        instance_mpi_local_args: an instance and options for mpirun for it, any number of times.
        allow_run_as_root: pass mpirun's option of that name.
        process_placement: `spreadnuma`, `cores`, `sockets` or `disabled`.
        torch_distributed_env: set the variables by which `torch.distributed` connects the instances.
        offline_mode: use no accelerators.
        synchronise_python_venv: copy the Python environment to the hosts.
        distribute_ssh_key: install the ssh key on the hosts.
        skip_checks: do not examine the hosts before the launch.
        start_timeout_s: limit for the start of all instances.
        host_timeout_s: silence after which a host is lost.
        on_failure: `stop`, `shrink` or `restart`.
        max_restarts: how often the job is started again at most.
        restart_backoff_s: the pause before the first restart; it doubles from one to the next.
        min_instances: the fewest instances with which the job goes on or is started again.
        inject: faults that are to happen, as they were written.
        stuck_timeout_s: so long an instance that others wait for may do nothing; 0: for ever.
        vipu_partition: the name or device map of a simulated partition; None: there is none.
        update_partition: give the partition the size that is needed.

    Raises:
        UsageError: numbers are out of range, or replicas or instances cannot be divided evenly.
    """

    program: tuple[str, ...]
    host: tuple[str, ...] = ()
    hostfile: str | None = None
    host_subnet: str | None = None
    num_replicas: int = 1
    num_instances: int = 1
    ipus_per_replica: int = 1
    num_ilds: int | None = None
    verbosity: int = 0
    debug: bool = False
    print_topology: bool = False
    dry_run: bool = False
    json: bool = False
    only_output_from: int | None = None
    no_tags: bool = False
    tag_host: bool = False
    timestamps: bool = False
    output_dir: str | None = None
    metrics: tuple[str, ...] = ()
    metrics_run: str = ""
    timeline: str | None = None
    timeline_limit: int | None = None
    profile: str | None = None
    summary: str = ""
    top_address: str | None = None
    executable_cache_path: str | None = None
    mpi_global_args: tuple[str, ...] = ()
    mpi_local_args: tuple[str, ...] = ()
    instance_mpi_local_args: tuple[tuple[int, tuple[str, ...]], ...] = ()
    allow_run_as_root: bool = False
    process_placement: str = "spreadnuma"
    torch_distributed_env: bool = False
    offline_mode: bool = False
    synchronise_python_venv: bool = False
    distribute_ssh_key: bool = False
    skip_checks: bool = False
    start_timeout_s: float = 60
    host_timeout_s: float = 10
    on_failure: str = "stop"
    max_restarts: int = 3
    restart_backoff_s: float = 1
    min_instances: int = 1
    inject: tuple[str, ...] = ()
    stuck_timeout_s: float = 300
    vipu_partition: str | None = None
    update_partition: bool = False

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            number = getattr(self, name)
            if number is not None and number < 1:
                raise UsageError(f"--{name.replace('_', '-')} is {number}; use 1 or more")
        self._check_division()
        self._check_domains()
        self._check_instances_named()
        self._check_exclusions()
        self._check_mpi_args()
        if not self.program:
            raise UsageError("no program given; usage: poprun [options] program [program arguments]")

    def _check_division(self) -> None:
        if self.num_replicas % self.num_instances:
            nearest = nearest_multiples(self.num_replicas, self.num_instances)
            raise UsageError(
                f"asked for {count(self.num_replicas, 'replica')} on {count(self.num_instances, 'instance')}; "
                f"replicas must divide evenly: use {nearest} (--num-replicas)"
            )

    def _check_domains(self) -> None:
        domains = self.domains
        if self.num_ilds is not None and self.num_ipus > domains * LARGEST_DOMAIN_IPUS:
            raise UsageError(
                f"asked for {self.num_ipus} IPUs ({count(self.num_replicas, 'replica')} x {self.ipus_per_replica}) in "
                f"{count(domains, 'ILD')}; an ILD has at most {LARGEST_DOMAIN_IPUS}: "
                f"use {-(-self.num_ipus // LARGEST_DOMAIN_IPUS)} or more (--num-ilds)"
            )
        if self.num_instances % domains:
            why = "" if self.num_ilds else f" ({self.num_ipus} IPUs in partition {self.vipu_partition})"
            raise UsageError(
                f"asked for {count(self.num_instances, 'instance')} on {count(domains, 'ILD')}{why}; instances must "
                f"divide evenly: use {nearest_multiples(self.num_instances, domains)} (--num-instances)"
            )

    def _check_instances_named(self) -> None:
        instances, last = count(self.num_instances, "instance"), self.num_instances - 1
        way_out = f"use 0 to {last}" if last else "use 0"
        shown = self.only_output_from
        if shown is not None and not 0 <= shown <= last:
            raise UsageError(f"--only-output-from-instance is {shown}, the job has {instances}; {way_out}")
        for index, _ in self.instance_mpi_local_args:
            if index > last:
                raise UsageError(
                    f"--instance-mpi-local-args names instance {index}, the job has {instances}; {way_out}"
                )
        for text in self.inject:
            if read_fault(text).instance > last:
                raise UsageError(
                    f"--inject {text!r} names an instance that is none, the job has {instances}; {way_out}"
                )

    def _check_mpi_args(self) -> None:
        """Refuse an option and its value in one word: quotes inside of quotes, or an entry of a list in TOML."""
        lists = [("mpi-global-args", self.mpi_global_args), ("mpi-local-args", self.mpi_local_args)]
        lists += [("instance-mpi-local-args", words) for _, words in self.instance_mpi_local_args]
        for name, words in lists:
            if words and _OPTION_AND_MORE.match(words[0]):
                raise UsageError(
                    f"--{name} begins with {words[0]!r}, all in one word, which mpirun does not split; "
                    "leave out the inner quotes, or make each word an entry of its own"
                )

    def _check_exclusions(self) -> None:
        read_summary(self.summary)
        try:
            parse_words(self.metrics)
        except ValueError as error:
            raise UsageError(f"--metrics {error}") from None
        self._check_profile()
        if self.host and self.hostfile:
            raise UsageError("--host and --hostfile are both given, each names all hosts; give one of them")
        if self.min_instances > self.num_instances:
            raise UsageError(
                f"--min-instances is {self.min_instances}, the job has {count(self.num_instances, 'instance')}; "
                f"use at most {self.num_instances}"
            )
        if self.no_tags and self.tag_host:
            raise UsageError(
                "--no-tags and --tag-host are both given, and the host is a part of the tag; give one of them"
            )
        if self.json and not self.dry_run:
            raise UsageError("--json is given without --dry-run, and a job has no JSON form; give both")

    def _check_profile(self) -> None:
        if self.profile is None:
            return
        try:
            WantedProfile.parse(self.profile)
        except ValueError as error:
            raise UsageError(f"--profile {error}") from None
        if self.timeline is None:
            raise UsageError("--profile is given without --timeline, and a profile is a part of a timeline; give both")

    @property
    def replicas_per_instance(self) -> int:
        """How many replicas each instance drives."""
        return self.num_replicas // self.num_instances

    @property
    def num_ipus(self) -> int:
        """The devices of all replicas."""
        return self.num_replicas * self.ipus_per_replica

    @property
    def uses_partition(self) -> bool:
        """Whether a simulated partition gives the instances their devices."""
        return self.vipu_partition is not None and not self.offline_mode

    @property
    def domains(self) -> int:
        """The IPU-Link domains: what is asked for, or else as many as a partition of this size has."""
        if self.num_ilds is None:
            return max(1, -(-self.num_ipus // LARGEST_DOMAIN_IPUS)) if self.uses_partition else 1
        return self.num_ilds

    @property
    def shows_topology(self) -> bool:
        """Whether the topology table is shown."""
        return self.print_topology or self.verbosity >= 2

    @property
    def all_mpi_args(self) -> tuple[str, ...]:
        """Every option for mpirun that the user gave, for whichever instance."""
        of_instances = (word for _, words in self.instance_mpi_local_args for word in words)
        return (*self.mpi_global_args, *self.mpi_local_args, *of_instances)

    def mpi_args_of(self, instance: int) -> tuple[str, ...]:
        """The options for mpirun of one instance: those of each instance, then its own."""
        own = (word for index, words in self.instance_mpi_local_args if index == instance for word in words)
        return (*self.mpi_local_args, *own)


def settings_from(line: CommandLine, environ: Mapping[str, str] = MappingProxyType({})) -> Settings:
    """The settings that a command line asks for; one replica for each instance unless it says how many.

    Args:
        line: what the user wrote.
        environ: may name a partition.

    Raises:
        UsageError: they are impossible.
    """
    given = line.values
    own = {_field_of(option.name): given[option.name] for option in OPTIONS if option.name in given}
    settings: dict[str, Any] = {name: value for name, value in own.items() if name in _FIELDS}
    texts = settings.pop("instance_mpi_local_args", ())
    settings.setdefault("num_replicas", settings.get("num_instances", 1))
    if environ.get(PARTITION_VARIABLE):
        settings.setdefault("vipu_partition", environ[PARTITION_VARIABLE])
    return Settings(
        program=line.program,
        verbosity=_verbosity(given),
        instance_mpi_local_args=tuple(read_instance_arguments(text) for text in texts),
        metrics_run=(environ.get(RUN_VARIABLE) or os.urandom(6).hex()) if settings.get("metrics") else "",
        **settings,
    )


_FIELDS = frozenset(Settings.__dataclass_fields__) - {"program", "verbosity", "metrics_run"}


def _field_of(option: str) -> str:
    return {"only-output-from-instance": "only_output_from"}.get(option, option.replace("-", "_"))


def _verbosity(given: Mapping[str, Value]) -> int:
    return 2 if given.get("vv") or given.get("debug") else int(bool(given.get("verbose")))
