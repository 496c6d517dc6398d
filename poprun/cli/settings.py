"""The settings of a launch: options checked together, values that follow from several, and notes on idle options.

What only some options need is loaded by their checks, because it delays every launch otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from poprun.cli.launch_options import OPTIONS, LaunchOptions
from poprun.cli.log import Level
from poprun.cli.mpi_arguments import JobArguments
from poprun.cli.options import NO_SDK, NO_SERVER, NO_SPARES, OFFLINE, ONE_HOST, STOPS, WORDS_FOR_NO, WORDS_FOR_YES
from poprun.cli.wording import count, size_text
from poprun.errors import UsageError

PARTITION_VARIABLE = "IPUOF_VIPU_API_PARTITION_ID"
"""Name of the partition if `--vipu-partition` is not given. Instances find the name of their partition in it."""

LARGEST_DOMAIN_IPUS = 64
"""The most IPUs of one IPU-Link domain."""

_POSITIVE = (
    *("num_replicas", "num_instances", "ipus_per_replica", "num_ilds"),
    *("start_timeout_s", "host_timeout_s", "min_instances"),
)
_OPTION_AND_MORE = re.compile(r"-[^\s=]*\s+\S")

FILE_PREFIX = "json:"

INSTEAD: Mapping[str, str] = {
    "--output-filename": "--output-dir",
    "--timestamp-output": "--timestamps",
    "--merge-stderr-to-stdout": "2>&1",
}
"""Output options of mpirun, each with poprun's option of the same effect; instances write to poprun, not to mpirun."""


@dataclass(frozen=True)
class SummaryAsked:
    """The summary that the user wants at the end of the job.

    Attributes:
        lines: Whether to show lines. None: only if standard error is a terminal.
        file: The JSON file for the whole summary. Empty: none.
    """

    lines: bool | None = None
    file: str = ""

    def shows_lines(self, is_terminal: bool, level: Level, environ: Mapping[str, str]) -> bool:
        """Return whether to show lines; by default on a terminal, unless the user wants to see errors only."""
        if self.lines is not None:
            return self.lines
        return is_terminal and level >= Level.WARN and environ.get("TERM", "dumb") != "dumb"

    @classmethod
    def read(cls, text: str) -> SummaryAsked:
        """Read a value of `--summary`; "" if the option is not given.

        Raises:
            UsageError: The text is no value of the option.
        """
        if not text:
            return cls()
        if text.lower() in WORDS_FOR_YES + WORDS_FOR_NO:
            return cls(lines=text.lower() in WORDS_FOR_YES)
        file = text.removeprefix(FILE_PREFIX)
        if not text.startswith(FILE_PREFIX) or not file:
            raise UsageError(f"--summary is {text!r}; use yes, no or {FILE_PREFIX}FILE")
        return cls(file=file)


class LaunchSettings(LaunchOptions):
    """The checked options of a launch.

    The class adds no field, so it inherits the dataclass's methods; generating them again takes milliseconds.

    Raises:
        UsageError: A number is out of range, options exclude each other, or replicas or instances do not divide evenly.
    """

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            number = getattr(self, name)
            if number is not None and number < 1:
                raise UsageError(f"--{name.replace('_', '-')} is {number}; use 1 or more")
        self._check_division()
        self._check_domains()
        self._check_spares()
        self._check_instances_named()
        self._check_exclusions()
        self._check_mpi_args()
        if not self.program:
            raise UsageError("no program given; usage: poprun [options] program [program arguments]")

    def _check_division(self) -> None:
        if self.num_replicas % self.num_instances:
            from popdist.environments.environment import nearest_multiples

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
            from popdist.environments.environment import nearest_multiples

            why = "" if self.num_ilds else f" ({self.num_ipus} IPUs in partition {self.vipu_partition})"
            raise UsageError(
                f"asked for {count(self.num_instances, 'instance')} on {count(domains, 'ILD')}{why}; instances must "
                f"divide evenly: use {nearest_multiples(self.num_instances, domains)} (--num-instances)"
            )

    def _check_spares(self) -> None:
        has_spares, asked = self.spares > 0, count(self.spares, "spare")
        if self.spares < 0:
            raise UsageError(f"--spares is {self.spares}; use 0 or more")
        if has_spares and not self.carries_on:
            raise UsageError(
                f"--on-failure is {self.on_failure}, so {asked} would never take a place; leave out --on-failure (then "
                "it is replace, which also starts the job again if a host is lost), or the spares"
            )
        if self.on_failure == "replace" and not has_spares:
            raise UsageError(
                "--on-failure is replace, but the job has no spares; use --spares N, or --on-failure shrink to go on "
                "with fewer instances"
            )
        if self.regrow and not self.carries_on:
            raise UsageError(
                f"--on-failure is {self.on_failure}, so no new instance could join the others; leave out --on-failure "
                "(then it is shrink), or --regrow"
            )

    def _check_instances_named(self) -> None:
        last, shown = self.num_processes - 1, self.only_output_from_instance
        wrong = [
            *([f"--only-output-from-instance is {shown}"] if shown is not None and not 0 <= shown <= last else []),
            *(f"--instance-mpi-local-args names instance {i}" for i, _ in self.instance_mpi_local_args if i > last),
            *(f"--inject {text!r} names an unknown instance" for text in self.inject if _instance(text) > last),
        ]
        for fact in wrong:
            way_out = f"use 0 to {last}" if last else "use 0"
            raise UsageError(f"{fact}, but the job has {size_text(self.num_instances, self.spares)}; {way_out}")

    def _check_mpi_args(self) -> None:
        """Refuse an option and its value in one word, as nested quotes or one entry of a TOML list make it."""
        lists = [("mpi-global-args", self.mpi_global_args), ("mpi-local-args", self.mpi_local_args)]
        lists += [("instance-mpi-local-args", words) for _, words in self.instance_mpi_local_args]
        for name, words in lists:
            if words and _OPTION_AND_MORE.match(words[0]):
                raise UsageError(
                    f"--{name} begins with the single word {words[0]!r}, which mpirun does not split; "
                    "remove the inner quotes, or make each word an entry of its own"
                )

    def _check_exclusions(self) -> None:
        SummaryAsked.read(self.summary)
        self._check_metrics()
        self._check_profile()
        if self.host and self.hostfile:
            raise UsageError("--host and --hostfile are both given, and each names all hosts; give one of them")
        if self.min_instances > self.num_instances:
            raise UsageError(
                f"--min-instances is {self.min_instances}, but the job has {count(self.num_instances, 'instance')}; "
                f"use at most {self.num_instances}"
            )
        if self.no_tags and self.tag_host:
            raise UsageError(
                "--no-tags and --tag-host are both given, and the host is a part of the tag; give one of them"
            )
        if self.json and not self.dry_run:
            raise UsageError("--json is given without --dry-run, and a job has no JSON form; give both")

    def _check_metrics(self) -> None:
        if not self.metrics:
            return
        from popdist.records.metric_words import parse_words

        try:
            parse_words(self.metrics)
        except ValueError as error:
            raise UsageError(f"--metrics {error}") from None

    def _check_profile(self) -> None:
        if self.profile is None:
            return
        from popdist.timeline.profiles import WantedProfile

        try:
            WantedProfile.parse(self.profile)
        except ValueError as error:
            raise UsageError(f"--profile {error}") from None
        if self.timeline is None:
            raise UsageError("--profile is given without --timeline, and a profile is a part of a timeline; give both")

    @property
    def replicas_per_instance(self) -> int:
        """The number of replicas that each instance drives."""
        return self.num_replicas // self.num_instances

    @property
    def reserves_per_host(self) -> int:
        """The number of reserves on each host; each may become a new instance."""
        return self.max_restarts if self.regrow else 0

    @property
    def num_processes(self) -> int:
        """The number of instances and spares."""
        return self.num_instances + self.spares

    @property
    def carries_on(self) -> bool:
        """Whether the job goes on without lost instances; with spares, `shrink` and `replace` mean the same."""
        return self.on_failure in ("shrink", "replace")

    @property
    def num_ipus(self) -> int:
        """The number of devices of all replicas."""
        return self.num_replicas * self.ipus_per_replica

    @property
    def uses_partition(self) -> bool:
        """Whether a simulated partition gives the instances their devices."""
        return self.vipu_partition is not None and not self.offline_mode

    @property
    def domains(self) -> int:
        """The number of IPU-Link domains: as requested, or as many as a partition of this size has."""
        if self.num_ilds is None:
            return max(1, -(-self.num_ipus // LARGEST_DOMAIN_IPUS)) if self.uses_partition else 1
        return self.num_ilds

    @property
    def shows_topology(self) -> bool:
        """Whether to show the topology table."""
        return self.print_topology or self.verbosity >= 2

    @property
    def verbosity(self) -> int:
        """The number of `v` in `-v` and `-vv`; `--debug` counts as 2."""
        return 2 if self.vv or self.debug else int(self.verbose)

    @cached_property
    def mpi(self) -> JobArguments:
        """The user's options for mpirun."""
        own = self.instance_mpi_local_args
        return JobArguments.read(self.mpi_global_args, self.mpi_local_args, own, self.num_processes)


def _instance(fault: str) -> int:
    """Return the instance of a fault; the fault was checked when the option was read."""
    from popdist.records.faults import parse_fault

    return parse_fault(fault).instance


def warn_of_deprecated(given: Collection[str]) -> list[str]:
    """Return a warning for each deprecated option among the given names."""
    return [
        f"--{option.name} is deprecated and has no effect; {option.deprecated}"
        for option in OPTIONS
        if option.deprecated and option.name in given
    ]


def warn_of_output(mpi_args: Collection[str]) -> list[str]:
    """Return a warning for each of the user's mpirun options for output, because they have no effect."""
    given = {word.partition("=")[0] for word in mpi_args}
    return [
        f"mpirun's {name} has no effect, because instances write to poprun; use {instead}"
        for name, instead in INSTEAD.items()
        if given & {name, name[1:]}
    ]


def note_without_effect(given: Collection[str], settings: LaunchOptions, leaves_this_machine: bool) -> list[str]:
    """Return a note for each reason why given options have no effect."""
    reasons = {
        NO_SERVER: True,
        NO_SDK: True,
        OFFLINE: settings.offline_mode,
        ONE_HOST: not leaves_this_machine,
        STOPS: settings.on_failure == "stop",
        NO_SPARES: not settings.spares,
    }
    idle = [option for option in OPTIONS if option.name in given and reasons.get(option.without_effect)]
    named = ((reason, [f"--{each.name}" for each in idle if each.without_effect == reason]) for reason in reasons)
    return [f"without effect, because {reason}: {', '.join(names)}" for reason, names in named if names]
