"""The choice of runs, and making them: each is a job of poprun's, whose instances record what they do."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

from popdist.records.recording import Recording
from poprun.cli.command_line import CommandLine, Value, settings_from
from poprun.cli.log import Log, level_from
from poprun.cli.settings import LaunchSettings
from poprun.errors import PopRunError, UsageError
from poprun.hosts.hosts import Host
from poprun.launch.launch import Launch
from poprun.launch.plan import find_hosts, plan_launch
from poprun.launch.program import check_user
from poprun.supervisor.job import run_job
from poprun.supervisor.job_machine import INTERRUPTS
from poprun.verify.options import GRPC, MPI, RING, SOME_FAULT, VerifyRequest, divisors
from poprun.verify.records import Record, StepPlace, read_record, record_files

WORKER_SCRIPT = Path(__file__).with_name("worker_script.py")
SAVED_STATUS = 128 + signal.SIGTERM
"""The exit status of a program that was stopped and has saved a checkpoint."""

_OF_INSTANCES = ("instance-mpi-local-args", "only-output-from-instance")

MOST_SPREADS = 4
INSTANCES_PER_CORE = 4
"""More than one, because what is to be proved does not depend on the time that it takes."""
INSTANCE_BYTES = 500 << 20
"""The memory that Python, JAX and a small model need."""


class Interrupted(Exception):
    """The user ends everything.

    Attributes:
        exit_status: 128 + the number of the signal.
    """

    def __init__(self, exit_status: int) -> None:
        super().__init__(exit_status)
        self.exit_status = exit_status


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        record: what its instances recorded.
        exit_status: poprun's; 0 where it is as it should be.
    """

    record: Record
    exit_status: int = 0


@dataclass(frozen=True)
class Laboratory:
    """Where runs are made.

    Attributes:
        asked: what the user wants.
        folder: for records.
        environ: the user's environment.
        leave_at: the step in which runs are stopped that are resumed.
    """

    asked: VerifyRequest
    folder: Path
    environ: Mapping[str, str]
    leave_at: int = 0

    def make(self, run: Run, name: str, values_at: StepPlace | None = None, steps: int | None = None) -> Result:
        """Run the program once, or twice if it is stopped in between.

        Args:
            run: how.
            name: of the folder of its record.
            values_at: the step whose values are kept.
            steps: after so many the program ends; None: as the user says.

        Raises:
            Interrupted: the user has ended it.
            PopRunError: it was stopped and has not been resumed.
        """
        recording = Recording(self.folder / name, self.asked.steps if steps is None else steps, values_at)
        if run.resumed_on is None:
            status = self._launch(run, recording)
            return Result(read_record(recording.folder), status)
        status = self._launch(run, replace(recording, leave_at=self.leave_at))
        if status != SAVED_STATUS:
            return Result(read_record(recording.folder), status)
        before = record_files(recording.folder)
        status = self._launch(replace(run, instances=run.resumed_on, resumed_on=None), recording)
        after = read_record(recording.folder, before)
        if after.steps and min(after.steps)[1] == 0:
            raise PopRunError(
                "the program was stopped by SIGTERM, and began anew instead of going on from a checkpoint; call "
                "restore before the first step and after_step after each one, in a with statement (docs: checkpoints)"
            )
        return Result(read_record(recording.folder), status)

    def _launch(self, run: Run, recording: Recording) -> int:
        recording.folder.mkdir(parents=True, exist_ok=True)
        launch = plan_run(self.asked, run, self.environ)
        wanted = recording.as_variables() | ({"POPDIST_MECHANISM": "ring"} if run.transport == RING else {})
        launch = replace(launch, extra={**launch.extra, **wanted})
        log = Log(level_from(launch.settings.verbosity, self.environ))
        with output_on_standard_error(), tempfile.TemporaryDirectory(prefix="poprun-") as sockets:
            ended = run_job(as_workers(launch, sockets) if run.transport == GRPC else launch, self.environ, log)
        if ended.was_told:
            ignore_interrupts()
            raise Interrupted(ended.exit_status)
        take_interrupts()
        return ended.exit_status


def plan_run(asked: VerifyRequest, run: Run, environ: Mapping[str, str]) -> Launch:
    """Decide everything about a run; nothing is started.

    Raises:
        PopRunError: it is impossible.
    """
    settings = settings_of(asked, run, environ)
    check_user(settings, os.geteuid(), environ)
    launch = plan_launch(settings, environ)
    if launch.leaves_this_machine and asked.record_dir is None:
        raise UsageError(
            "instances on other hosts have to write their records where poprun reads them; give --record-dir, "
            "a directory that all hosts share"
        )
    if launch.leaves_this_machine and run.transport == GRPC:
        raise UsageError("workers over grpc meet at sockets of one machine; leave grpc out, or the other hosts")
    return launch


def settings_of(asked: VerifyRequest, run: Run, environ: Mapping[str, str] = MappingProxyType({})) -> LaunchSettings:
    """Return the settings of a run: what the user asked for, as far as it has such instances and hosts.

    Args:
        asked: by the user.
        run: which one.
        environ: may name a partition.
    """
    values: dict[str, Value] = {**asked.line.values, "num-instances": run.instances}
    of_instances = values.pop("instance-mpi-local-args", ())
    assert isinstance(of_instances, tuple)
    kept = tuple(text for text in of_instances if not _names_other(text, run.instances))
    shown = values.get("only-output-from-instance")
    if isinstance(shown, int) and shown >= run.instances:
        values["only-output-from-instance"] = 0
    if "output-dir" in values:
        values["output-dir"] = str(Path(str(values["output-dir"])) / _folder_name(run))
    if run.faults:
        values |= {"inject": run.faults, "on-failure": "shrink"}
    if kept:
        values["instance-mpi-local-args"] = kept
    settings = settings_from(CommandLine(values, asked.line.program), environ)
    if not settings.host and settings.hostfile is None:
        return settings
    hosts = hosts_of(asked)
    used = hosts[: gcd(run.instances, len(hosts))]
    return replace(settings, host=tuple(host.name for host in used), hostfile=None)


def hosts_of(asked: VerifyRequest) -> tuple[Host, ...]:
    """Return the hosts that the user names, else this machine; a run takes a number that divides its instances."""
    named = {name: value for name, value in asked.line.values.items() if name in ("host", "hostfile")}
    return find_hosts(settings_from(CommandLine(named, asked.line.program)))


def _names_other(text: str, instances: int) -> bool:
    index = text.partition(":")[0].strip()
    return index.isdecimal() and int(index) >= instances


def _folder_name(run: Run) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in str(run))


def as_workers(launch: Launch, sockets: str) -> Launch:
    """Return the launch whose instances are workers of a cluster over gRPC, with sockets in a directory."""
    words = (sys.executable, "-I", "-S", str(WORKER_SCRIPT), sockets)
    return replace(launch, settings=replace(launch.settings, program=(*words, *launch.settings.program)))


@contextmanager
def output_on_standard_error() -> Iterator[None]:
    """Send the output of programs to standard error, so that the report is alone on standard output."""
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def take_interrupts() -> None:
    """Have signals that end a command raise `Interrupted`, outside of runs, which take them themselves."""

    def interrupt(number: int, _: object) -> NoReturn:
        ignore_interrupts()  # while everything is put away
        raise Interrupted(128 + number)

    for number in INTERRUPTS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)


def ignore_interrupts() -> None:
    """Let nothing disturb the end of the command, which comes at once."""
    for number in INTERRUPTS:
        signal.signal(number, signal.SIG_IGN)


@dataclass(frozen=True)
class Run:
    """One run of the program.

    Attributes:
        instances: how many processes.
        replicas: of all of them.
        transport: what connects them.
        faults: what goes wrong; the others go on without the instance that is lost.
        resumed_on: after it was stopped; None: it is not.
    """

    instances: int
    replicas: int
    transport: str = MPI
    faults: tuple[str, ...] = ()
    resumed_on: int | None = None

    @property
    def spread(self) -> str:
        """Instances x replicas of each."""
        text = f"{self.instances} x {self.replicas // self.instances}"
        return text if self.resumed_on is None else f"{text}, {self.resumed_on} x {self.replicas // self.resumed_on}"

    @property
    def how(self) -> str:
        """The circumstances of the run."""
        if self.faults:
            return f"{self.transport}, {'; '.join(self.faults)}"
        if self.resumed_on is not None:
            return f"{self.transport}, stopped and resumed"
        return "-" if self.instances == 1 and self.transport != GRPC else self.transport

    def __str__(self) -> str:
        return self.spread if self.how in (MPI, "-") else f"{self.spread} ({self.how})"


def choose_spreads(replicas: int, cores: int, memory_bytes: int | None) -> tuple[int, ...]:
    """Choose up to MOST_SPREADS numbers of instances: one, the most that fit the machine, some in between.

    Args:
        replicas: R, which has to be divisible by them.
        cores: of all hosts.
        memory_bytes: that is available; None: unknown.
    """
    most = INSTANCES_PER_CORE * cores
    if memory_bytes is not None:
        most = min(most, memory_bytes // INSTANCE_BYTES)
    fitting = [each for each in divisors(replicas) if each <= max(most, 2)] or [1]
    if len(fitting) <= MOST_SPREADS:
        return tuple(fitting)
    last = len(fitting) - 1
    return tuple(fitting[round(number * last / (MOST_SPREADS - 1))] for number in range(MOST_SPREADS))


def plain_runs(asked: VerifyRequest, spreads: Sequence[int]) -> list[Run]:
    """Return the runs without failures; a single run is made twice, to see whether it can be repeated."""
    runs = [
        Run(instances, asked.replicas, transport)
        for number, transport in enumerate(asked.transports)
        for instances in spreads
        if instances > 1 or number == 0
    ]
    return runs * 2 if len(runs) == 1 and asked.against is None else runs


def run_with_failure(asked: VerifyRequest, plain: Sequence[Run], steps: int) -> Run | None:
    """Return the run with a failure under shrink; None where none is wanted.

    Args:
        asked: whether there is one, and which failure.
        plain: the other runs; there is one of several instances over MPI.
        steps: how many they made.
    """
    if not asked.inject:
        return None
    run = max((each for each in plain if can_shrink(each)), key=lambda each: each.instances)
    chosen = f"kill:instance={run.instances - 1},step={steps // 2}"
    faults = (chosen,) if asked.inject == (SOME_FAULT,) else asked.inject
    return Run(run.instances, run.replicas, run.transport, faults)


def can_shrink(run: Run) -> bool:
    """Return whether it could go on without an instance."""
    return run.instances > 1 and run.transport != GRPC


def run_to_resume(asked: VerifyRequest, plain: Sequence[Run]) -> Run | None:
    """Return the run that is stopped and resumed on fewer instances if possible; None if none is wanted."""
    if not asked.resume:
        return None
    spreads = sorted({run.instances for run in plain})
    return Run(spreads[-1], asked.replicas, asked.transports[0], resumed_on=spreads[max(0, len(spreads) - 2)])
