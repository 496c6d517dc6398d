"""The choice and the execution of runs; each run is a job of poprun whose instances record their steps."""

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
from poprun.cli.wording import count
from poprun.errors import PopRunError, UsageError
from poprun.hosts.hosts import Host
from poprun.launch.launch import Launch
from poprun.launch.plan import find_hosts, plan_launch
from poprun.launch.variables import HASH_SEED
from poprun.monitor.watching import watch_nothing
from poprun.supervisor.job import run_job
from poprun.supervisor.signals import INTERRUPTS
from poprun.verify.options import GRPC, MPI, RING, SOME_FAULT, VerifyRequest, divisors
from poprun.verify.records import Record, StepPlace, read_record, record_files

WORKER_SCRIPT = Path(__file__).with_name("worker_script.py")
SAVED_STATUS = 128 + signal.SIGTERM
"""The exit status of a program that was stopped after it has saved a checkpoint."""

MOST_SPREADS = 4
INSTANCES_PER_CORE = 4
"""The most instances per core. It is more than one, because the time that a run takes does not matter here."""
USUAL_SPARES = 1
"""The number of spares of the run with losses, if the user names none."""
MOST_WITH_LOSSES = 4
"""The most instances of the run with losses, if the user names no spreads; fewer make it quicker."""
FEWEST_STEPS_FOR_TWO = 3
"""The least number of steps of a run in which two instances are lost, one after the other."""
INSTANCE_BYTES = 500 << 20
"""The memory for Python, JAX and a small model."""


class Interrupted(Exception):
    """A signal from the user that ends the command.

    Attributes:
        exit_status: The exit status, 128 + the number of the signal.
    """

    def __init__(self, exit_status: int) -> None:
        super().__init__(exit_status)
        self.exit_status = exit_status


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        record: The record of its instances.
        exit_status: The exit status of poprun; 0 if it is the expected one.
    """

    record: Record
    exit_status: int = 0


@dataclass(frozen=True)
class Laboratory:
    """The maker of runs, with the settings for all of them.

    Attributes:
        asked: The user's request.
        folder: The folder for records.
        environ: The user's environment.
        leave_at: The step in which instance 0 gets SIGTERM, if the run is to be resumed.
    """

    asked: VerifyRequest
    folder: Path
    environ: Mapping[str, str]
    leave_at: int = 0

    def make(self, run: Run, name: str, values_at: StepPlace | None = None, steps: int | None = None) -> Result:
        """Run the program once, or twice if it is stopped in between.

        Args:
            run: The run to make.
            name: The name of the folder for its record.
            values_at: The step whose values are stored; None for no step.
            steps: The number of steps after which the program ends; None for the number in the request.

        Raises:
            Interrupted: If the user has ended the run.
            PopRunError: If the run was stopped, and then began anew instead of resuming.
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
        if HASH_SEED in launch.extra:  # other launchers leave it random too: show a program that depends on it
            wanted[HASH_SEED] = "random"
        launch = replace(launch, extra={**launch.extra, **wanted})
        log = Log(level_from(launch.settings.verbosity, self.environ))
        with output_on_standard_error(), tempfile.TemporaryDirectory(prefix="poprun-") as sockets:
            as_started = as_workers(launch, sockets) if run.transport == GRPC else launch
            ended = run_job(as_started, self.environ, log, watch_nothing)
        if ended.was_told:
            ignore_interrupts()
            raise Interrupted(ended.exit_status)
        take_interrupts()
        return ended.exit_status


def plan_run(asked: VerifyRequest, run: Run, environ: Mapping[str, str]) -> Launch:
    """Return the launch of a run; nothing is started.

    Raises:
        PopRunError: If the run is impossible.
    """
    settings = settings_of(asked, run, environ)
    launch = plan_launch(settings, environ)
    if launch.leaves_this_machine and asked.record_dir is None:
        raise UsageError(
            "instances on other hosts must write their records where poprun reads them; give --record-dir, "
            "a directory that all hosts share"
        )
    if launch.leaves_this_machine and run.transport == GRPC:
        raise UsageError(
            "verify connects workers over gRPC by sockets of one machine, and this run uses other hosts; "
            "leave grpc out of --transports, or use only this machine"
        )
    return launch


def settings_of(asked: VerifyRequest, run: Run, environ: Mapping[str, str] = MappingProxyType({})) -> LaunchSettings:
    """Return the settings of a run: the user's settings, without settings for instances and hosts that it lacks.

    Args:
        asked: The user's request.
        run: The run.
        environ: The environment, which may name a partition.
    """
    values: dict[str, Value] = {**asked.line.values, "num-instances": run.instances}
    values.pop("spares", None)  # only the run with losses has spares
    processes = run.instances + run.spares
    of_instances = values.pop("instance-mpi-local-args", ())
    assert isinstance(of_instances, tuple)
    kept = tuple(text for text in of_instances if not _names_other(text, processes))
    shown = values.get("only-output-from-instance")
    if isinstance(shown, int) and shown >= processes:
        values["only-output-from-instance"] = 0
    if "output-dir" in values:
        folder = "".join(letter if letter.isalnum() else "-" for letter in str(run))
        values["output-dir"] = str(Path(str(values["output-dir"])) / folder)
    if run.faults:
        values |= {"inject": run.faults, "on-failure": "shrink", "max-restarts": 0}
    if run.spares:
        values |= {"on-failure": "replace", "spares": run.spares}
    if kept:
        values["instance-mpi-local-args"] = kept
    settings = settings_from(CommandLine(values, asked.line.program), environ)
    if not settings.host and settings.hostfile is None:
        return settings
    hosts = hosts_of(asked)
    used = hosts[: gcd(run.instances, len(hosts))]
    return replace(settings, host=tuple(host.name for host in used), hostfile=None)


def hosts_of(asked: VerifyRequest) -> tuple[Host, ...]:
    """Return the hosts that the user names, else this machine; a run uses the first gcd(instances, hosts) of them."""
    named = {name: value for name, value in asked.line.values.items() if name in ("host", "hostfile")}
    return find_hosts(settings_from(CommandLine(named, asked.line.program)))


def _names_other(text: str, processes: int) -> bool:
    index = text.partition(":")[0].strip()
    return index.isdecimal() and int(index) >= processes


def as_workers(launch: Launch, sockets: str) -> Launch:
    """Return the launch with its instances as workers over gRPC, whose sockets are in the directory `sockets`."""
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
    """Let signals that end a command raise `Interrupted`; during a run, the supervisor handles them itself."""

    def interrupt(number: int, _: object) -> NoReturn:
        ignore_interrupts()  # while the command cleans up
        raise Interrupted(128 + number)

    for number in INTERRUPTS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)


def ignore_interrupts() -> None:
    """Ignore further signals while the command ends, which takes a moment only."""
    for number in INTERRUPTS:
        signal.signal(number, signal.SIG_IGN)


@dataclass(frozen=True)
class Run:
    """One run of the program.

    Attributes:
        instances: The number of instances.
        replicas: The number of replicas of all instances.
        transport: The connection between instances.
        faults: The faults to inject; the other instances go on without the lost one.
        resumed_on: The number of instances on which the run is resumed; None if it is not stopped.
        spares: The number of spares.
    """

    instances: int
    replicas: int
    transport: str = MPI
    faults: tuple[str, ...] = ()
    resumed_on: int | None = None
    spares: int = 0

    @property
    def spread(self) -> str:
        """The spread as text: instances x replicas of each."""
        text = f"{self.instances} x {self.replicas // self.instances}"
        if self.spares:
            return f"{text}, {count(self.spares, 'spare')}"
        return text if self.resumed_on is None else f"{text}, {self.resumed_on} x {self.replicas // self.resumed_on}"

    @property
    def how(self) -> str:
        """The transport and the incidents of the run as text."""
        if self.faults:
            what = self.faults[0] if len(self.faults) == 1 else count(len(self.faults), "fault")
            return f"{self.transport}, {what}"
        if self.resumed_on is not None:
            return f"{self.transport}, stopped and resumed"
        return "-" if self.instances == 1 and self.transport != GRPC else self.transport

    def __str__(self) -> str:
        return self.spread if self.how in (MPI, "-") else f"{self.spread} ({self.how})"


def choose_spreads(replicas: int, cores: int, memory_bytes: int | None) -> tuple[int, ...]:
    """Choose up to MOST_SPREADS numbers of instances: one, the largest that the machine can run, and some in between.

    Args:
        replicas: R; each number divides it.
        cores: The cores of all hosts.
        memory_bytes: The available memory; None if unknown.
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
    """Return the runs without failures; a single run is made twice, to test whether it is repeatable."""
    runs = [
        Run(instances, asked.replicas, transport)
        for number, transport in enumerate(asked.transports)
        for instances in spreads
        if instances > 1 or number == 0
    ]
    return runs * 2 if len(runs) == 1 and asked.against is None and not asked.with_losses else runs


def run_with_failure(asked: VerifyRequest, plain: Sequence[Run], steps: int) -> Run | None:
    """Return the run with a failure under shrink; None if the user did not ask for one.

    Args:
        asked: The user's request, which may name the failure.
        plain: The other runs; at least one has several instances over MPI.
        steps: The number of steps of the other runs.
    """
    if not asked.inject:
        return None
    run = max((each for each in plain if can_shrink(each)), key=lambda each: each.instances)
    chosen = f"kill:instance={run.instances - 1},step={steps // 2}"
    faults = (chosen,) if asked.inject == (SOME_FAULT,) else asked.inject
    return Run(run.instances, run.replicas, run.transport, faults, spares=asked.named_spares or 0)


def run_with_losses(asked: VerifyRequest, spreads: Sequence[int], steps: int) -> Run | None:
    """Return the run that loses instances, and in which a spare joins; None if the user did not ask for it.

    Args:
        asked: The user's request.
        spreads: The numbers of instances that the user names, or else that fit.
        steps: The number of steps of the longest training.

    Raises:
        UsageError: If there is no number of instances of which one can be lost.
    """
    if not asked.with_losses:
        return None
    several = sorted(each for each in spreads if each > 1)
    if not several:
        raise UsageError(
            "--with-losses needs a run of several instances, of which one is lost, but the numbers of instances are "
            f"{', '.join(map(str, spreads))}; use --num-replicas 2 or more, and name 2 or more with --spreads"
        )
    fewer = [each for each in several if each <= MOST_WITH_LOSSES]
    instances = max(several) if asked.spreads else max(fewer, default=min(several))
    transport = next(each for each in asked.transports if each != GRPC)
    faults, spares = choose_losses(instances, steps), spares_with_losses(asked)
    return Run(instances, asked.replicas, transport, faults, spares=spares)


def spares_with_losses(asked: VerifyRequest) -> int:
    """Return the number of spares of the run that loses instances."""
    return USUAL_SPARES if asked.named_spares is None else asked.named_spares


def choose_losses(instances: int, steps: int) -> tuple[str, ...]:
    """Return faults that leave at least one instance, even if no spare can run the program.

    The chief is lost in a third of the steps, so that a spare joins in the middle if there is one. In a run of three
    instances or more, the last one is lost in two thirds of the steps.

    Args:
        instances: The number of instances, at least 2.
        steps: The number of steps of the longest training.
    """
    first = f"kill:instance=0,step={steps // 3}"
    if instances < 3 or steps < FEWEST_STEPS_FOR_TWO:
        return (first,)
    return first, f"kill:instance={instances - 1},step={2 * steps // 3}"


def can_shrink(run: Run) -> bool:
    """Return whether a run could go on without an instance."""
    return run.instances > 1 and run.transport != GRPC


def run_to_resume(asked: VerifyRequest, plain: Sequence[Run]) -> Run | None:
    """Return the run that is stopped and resumed, on fewer instances if possible; None if none is asked for."""
    if not asked.resume:
        return None
    spreads = sorted({run.instances for run in plain})
    return Run(spreads[-1], asked.replicas, asked.transports[0], resumed_on=spreads[max(0, len(spreads) - 2)])
