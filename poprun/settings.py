"""What the user asked for, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from poprun.command_line import CommandLine
from poprun.errors import UsageError


@dataclass(frozen=True)
class Settings:
    """The settings of one launch.

    Attributes:
        program: the program and its arguments.
        num_replicas: replicas of all instances together.
        num_instances: processes.
        ipus_per_replica: devices that one replica spans.
        verbosity: 0, 1 (`-v`) or 2 (`-vv`).
        print_topology: show the table.
        dry_run: print the command, run nothing.
        only_output_from: the instance whose output is shown; None: all.
        mpi_global_args: options for mpirun.
        mpi_local_args: options for mpirun, for each instance.
        allow_run_as_root: pass mpirun's option of that name.
        process_placement: `spreadnuma` or `disabled`.
        offline_mode: use no accelerators.

    Raises:
        UsageError: numbers are out of range, or replicas cannot be divided evenly.
    """

    program: tuple[str, ...]
    num_replicas: int = 1
    num_instances: int = 1
    ipus_per_replica: int = 1
    verbosity: int = 0
    print_topology: bool = False
    dry_run: bool = False
    only_output_from: int | None = None
    mpi_global_args: tuple[str, ...] = ()
    mpi_local_args: tuple[str, ...] = ()
    allow_run_as_root: bool = False
    process_placement: str = "spreadnuma"
    offline_mode: bool = False

    def __post_init__(self) -> None:
        for name in ("num_replicas", "num_instances", "ipus_per_replica"):
            number = getattr(self, name)
            if number < 1:
                raise UsageError(f"--{name.replace('_', '-')} is {number}; use 1 or more")
        self._check_division()
        self._check_shown()
        if not self.program:
            raise UsageError("no program given; usage: poprun [options] program [program arguments]")

    def _check_shown(self) -> None:
        shown = self.only_output_from
        if shown is not None and not 0 <= shown < self.num_instances:
            instances = _count(self.num_instances, "instance")
            raise UsageError(
                f"--only-output-from-instance is {shown}, the job has {instances}; use 0 to {self.num_instances - 1}"
            )

    def _check_division(self) -> None:
        if self.num_replicas % self.num_instances:
            below = self.num_replicas // self.num_instances * self.num_instances
            nearest = " or ".join(str(n) for n in (below, below + self.num_instances) if n)
            replicas, instances = _count(self.num_replicas, "replica"), _count(self.num_instances, "instance")
            raise UsageError(
                f"asked for {replicas} on {instances}; replicas must divide evenly: use {nearest} (--num-replicas)"
            )

    @property
    def replicas_per_instance(self) -> int:
        """How many replicas each instance drives."""
        return self.num_replicas // self.num_instances

    @property
    def shows_topology(self) -> bool:
        """Whether the topology table is shown."""
        return self.print_topology or self.verbosity >= 2


def settings_from(line: CommandLine) -> Settings:
    """The settings that a command line asks for.

    Raises:
        UsageError: they are impossible.
    """
    given = line.values
    only = given.get("only-output-from-instance")
    return Settings(
        program=line.program,
        num_replicas=int(cast(int, given.get("num-replicas", 1))),
        num_instances=int(cast(int, given.get("num-instances", 1))),
        ipus_per_replica=int(cast(int, given.get("ipus-per-replica", 1))),
        verbosity=2 if given.get("vv") else int(bool(given.get("verbose"))),
        print_topology=bool(given.get("print-topology")),
        dry_run=bool(given.get("dry-run")),
        only_output_from=None if only is None else int(cast(int, only)),
        mpi_global_args=cast("tuple[str, ...]", given.get("mpi-global-args", ())),
        mpi_local_args=cast("tuple[str, ...]", given.get("mpi-local-args", ())),
        allow_run_as_root=bool(given.get("allow-run-as-root")),
        process_placement=str(given.get("process-placement", "spreadnuma")),
        offline_mode=bool(given.get("offline-mode")),
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
