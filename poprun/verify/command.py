"""The command `poprun verify`: it runs a program under several spreads and compares the records of its Trainer."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from poprun.cli.log import Log, show
from poprun.cli.wording import USUAL_COLUMNS, columns_of, count, draw_rows, duration_text, without_controls
from poprun.errors import PopRunError, UsageError
from poprun.hosts.this_machine import usable_cores
from poprun.supervisor.job import end_standard_input
from poprun.supervisor.signals import INTERRUPTS
from poprun.verify.certificate import (
    Certificate,
    asked_again,
    certificate_of,
    changed_facts,
    check_writable,
    describe_options_of,
    read_certificate,
    shortened,
    write_certificate,
)
from poprun.verify.comparison import earliest, first_difference, first_inside, first_of_metrics
from poprun.verify.explanation import describe_metrics, explain
from poprun.verify.losses import course_of, longest_training, obstacle_to_losses
from poprun.verify.options import VerifyRequest, describe_verify, read_words
from poprun.verify.report import RunOutcome, describe_difference, describe_success, draw_table, result_of
from poprun.verify.running import (
    Interrupted,
    Laboratory,
    Result,
    Run,
    can_shrink,
    choose_spreads,
    hosts_of,
    plain_runs,
    plan_run,
    run_to_resume,
    run_with_failure,
    run_with_losses,
    spares_with_losses,
    take_interrupts,
)

FEWEST_STEPS_TO_RESUME = 4


def main(words: Sequence[str]) -> int:
    """Run `poprun verify`.

    Returns:
        The exit status: 0 if all runs are equal, 1 if not, 128 + n after signal n.

    Raises:
        PopRunError: If the words are wrong, or if the program cannot be verified.
    """
    asked = read_words(words)
    if asked is None:
        show(describe_verify(columns_of(os.environ) or USUAL_COLUMNS))
        return 0
    certificate = None if asked.against is None else read_certificate(asked.against)
    if certificate is not None:
        if words_of_file := describe_options_of(certificate, asked):
            show(without_controls(f"poprun verify: {asked.against} says: {words_of_file}"), 2)
        asked = asked_again(asked, certificate)
    spreads, plain = prepare(asked)
    before = {number: signal.getsignal(number) for number in INTERRUPTS}
    take_interrupts()
    try:
        with folder_for(asked) as folder:
            end_standard_input()
            return Verification(asked, spreads, plain, Laboratory(asked, folder, os.environ), certificate).run()
    except Interrupted as interrupted:
        return interrupted.exit_status
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def prepare(asked: VerifyRequest) -> tuple[tuple[int, ...], list[Run]]:
    """Check the request without starting anything, and return the spreads and the runs without failures.

    Raises:
        PopRunError: If a run is impossible.
    """
    if asked.certificate is not None:
        check_writable(asked.certificate)
    if asked.record_dir is not None and asked.record_dir.exists():
        raise UsageError(f"--record-dir {asked.record_dir} exists already; name a new directory")
    hosts = hosts_of(asked)
    cores = len(usable_cores()) * len(hosts)
    spreads = asked.spreads or choose_spreads(asked.replicas, cores, available_memory() if len(hosts) == 1 else None)
    needs_several = asked.spreads or asked.inject or asked.resume or not asked.with_losses
    plain = plain_runs(asked, spreads if needs_several else (1,))
    if asked.inject and not any(can_shrink(run) for run in plain):
        raise UsageError(
            "--inject needs a run of several instances over MPI, but the runs are "
            f"{', '.join(map(str, plain))}; name one with --spreads"
        )
    extra = (run_with_failure(asked, plain, 1), run_with_losses(asked, spreads, 1))
    for run in dict.fromkeys([*plain, *filter(None, extra)]):
        plan_run(asked, run, os.environ)
    return spreads, plain


def available_memory() -> int | None:
    """Return the bytes of memory that programs may still take on this machine; None if the kernel does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)


@contextmanager
def folder_for(asked: VerifyRequest) -> Iterator[Path]:
    """Provide the folder of the records; remove it afterwards, unless the user has named it."""
    if asked.record_dir is not None:
        try:
            asked.record_dir.mkdir(parents=True)
        except OSError as error:
            raise UsageError(f"--record-dir {asked.record_dir} cannot be made: {error.strerror}") from None
        yield asked.record_dir.absolute()
        return
    folder = tempfile.mkdtemp(prefix="poprun-verify-")
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Verification:
    """One call of the command.

    Attributes:
        asked: The user's request.
        spreads: The numbers of instances.
        plain: The runs without failures.
        laboratory: The maker of runs.
        against: The certificate to compare with; None without one.
    """

    asked: VerifyRequest
    spreads: Sequence[int]
    plain: Sequence[Run]
    laboratory: Laboratory
    against: Certificate | None

    def __post_init__(self) -> None:
        self._began_s = time.monotonic()
        self._running_s = 0.0
        self._outcomes: list[RunOutcome] = []

    def run(self) -> int:
        """Make all runs, print the report, and return the exit status."""
        for run in self.plain:
            self._make(run)
            if len(self._outcomes) == 1:
                self._check_first()
        steps = len(self._first.record.steps)
        longest = longest_training(self._first.record)
        for run in self._with_failures(steps, longest):
            self._make(run)
        resumed = run_to_resume(self.asked, self.plain)
        if resumed is not None:
            self.laboratory = replace(self.laboratory, leave_at=steps // 2 - 1)
            self._make(resumed)
        show(draw_table(self._outcomes, columns_of(os.environ)))
        is_equal = self._explain()
        if self.against is not None:
            is_equal &= self._compare(self.against)
        if is_equal and self.asked.certificate is not None:
            runs = [str(each.run) for each in self._outcomes]
            write_certificate(
                self.asked.certificate, certificate_of(self.asked, self.spreads, runs, self._first.record)
            )
        elif self.asked.certificate is not None:
            show(f"\nno certificate was written to {self.asked.certificate}, because not everything is equal")
        own_s = time.monotonic() - self._began_s - self._running_s
        recording_s = sum(each.record.recording_s for each in self._outcomes)
        show(
            f"the runs took {self._running_s:.1f} s, including {recording_s:.1f} s for recording; "
            f"verify itself took {own_s:.1f} s"
        )
        return 0 if is_equal else 1

    @property
    def _has_trainings(self) -> bool:
        return len({training for training, _ in self._first.record.steps}) > 1

    @property
    def _first(self) -> RunOutcome:
        return self._outcomes[0]

    def _make(self, run: Run) -> None:
        """Make one run, and compare it with the first one."""
        number = len(self._outcomes) + 1
        show(f"poprun verify: run {number} of {self._runs_in_all}, {run}", 2)
        if run.resumed_on is not None:
            show("poprun verify: instance 0 gets SIGTERM half-way; the run should then end with exit status 143", 2)
        began_s = time.monotonic()
        try:
            result = self.laboratory.make(run, str(number))
        finally:
            self._running_s += time.monotonic() - began_s
        check_processes(result, run)
        difference = first_difference(self._first.record, result.record) if self._outcomes else None
        difference = difference or first_inside(result.record)
        metrics = first_of_metrics(self._outcomes[0].record if self._outcomes else result.record, result.record)
        course = course_of(result.record, run) if run.faults and not result.exit_status else None
        self._outcomes.append(RunOutcome(run, result.record, result.exit_status, difference, metrics, course))
        self._tell_progress(time.monotonic() - began_s)

    @property
    def _runs_in_all(self) -> int:
        resumed = run_to_resume(self.asked, self.plain) is not None
        return len(self.plain) + len(self._with_failures(1, 1)) + resumed

    def _with_failures(self, steps: int, longest: int) -> list[Run]:
        """Return the runs in which instances fail.

        Args:
            steps: The number of steps of a run without failures.
            longest: The number of steps of its longest training.
        """
        asked = (run_with_failure(self.asked, self.plain, steps), run_with_losses(self.asked, self.spreads, longest))
        return [run for run in asked if run is not None]

    def _tell_progress(self, lasted_s: float) -> None:
        """Print the result of the last run, and the remaining time."""
        number, left = len(self._outcomes), self._runs_in_all - len(self._outcomes)
        what = result_of(self._outcomes[-1], number, self._has_trainings)
        each_s = self._running_s / number
        rest = f"{count(left, 'run')} left, about {duration_text(left * each_s)}" if left else "that was the last one"
        show(f"poprun verify: run {number} took {duration_text(lasted_s)}: {what}; {rest}", 2)

    def _check_first(self) -> None:
        """Raise PopRunError if the first run shows that the program cannot be verified."""
        first = self._first
        if first.exit_status:
            raise PopRunError(
                f"the program failed with exit status {first.exit_status} in its first run ({first.run}); "
                "runs can be compared only if they complete"
            )
        if not first.record.steps:
            raise PopRunError(
                "the program completed and has recorded no step; only programs that train by strategies.Trainer "
                "(its step or run) can be verified; a program of plain popdist or JAX needs one"
            )
        if self.asked.with_losses and (obstacle := obstacle_to_losses(first.record, spares_with_losses(self.asked))):
            raise PopRunError(obstacle)
        if self.asked.resume and not first.record.checkpoints:
            raise PopRunError(
                "--resume needs a program that saves checkpoints, and this one has made no strategies.Checkpoints; "
                "give it the arguments that make it save (docs: checkpoints)"
            )
        steps = len(first.record.steps)
        if self.asked.resume and steps < FEWEST_STEPS_TO_RESUME:
            raise PopRunError(
                f"--resume needs {FEWEST_STEPS_TO_RESUME} steps or more, to stop half-way, and the program made "
                f"{steps}; have it make more"
            )

    def _explain(self) -> bool:
        """Explain the first difference; return whether all runs are equal and successful."""
        number = earliest(self._first.record, [each.difference for each in self._outcomes])
        if number is not None:
            began_s = time.monotonic()
            names = self._name(0), self._name(number)
            text = explain(self.laboratory, self._first, self._outcomes[number], names)
            self._running_s += time.monotonic() - began_s
            show(f"\n{text}")
        for number, each in enumerate(self._outcomes):
            if each.metrics is not None and each.difference is None:
                show(f"\n{describe_metrics(each.metrics, self._first.record, each.record, self._name(number))}")
        for number, each in enumerate(self._outcomes):
            if each.course is not None:
                show(f"\n{self._name(number)}\n{each.course.describe(self._has_trainings, columns_of(os.environ))}")
        if all(each.is_well for each in self._outcomes):
            show(f"\n{describe_success(self._outcomes)}")
            return True
        for each in self._outcomes:
            if each.exit_status:
                show(f"\n{each.run} failed with exit status {each.exit_status}; the reason is above, on standard error")
        return False

    def _name(self, number: int) -> str:
        """Return the name of a run: its spread, or its number if several runs have that spread."""
        names = [str(each.run) for each in self._outcomes]
        return names[number] if names.count(names[number]) == 1 else f"run {number + 1}"

    def _compare(self, certificate: Certificate) -> bool:
        """Print the changes since a certificate was written; return whether all bits are the same."""
        if not certificate.is_as_written:
            Log().error(f"certificate {self.asked.against} was changed after it was written; do not rely on it")
        changed = changed_facts(certificate, self._first.record)
        if changed:
            rows = [("  what", "then", "now"), *((f"  {name}", then, now) for name, then, now in changed)]
            show(f"\nchanged since the certificate was written:\n{draw_rows(rows, columns_of(os.environ))}")
        difference = first_difference(certificate.record, shortened(self._first.record))
        if difference is None:
            show(
                f"\nthe certificate {self.asked.against} has the same bits in all {len(self._first.record.steps)} steps"
            )
        else:
            names = [(name, "") for name in difference.names]
            sides = ("the certificate", str(self._first.run))
            show(f"\n{describe_difference(difference, sides, names, '')}")
        return difference is None and certificate.is_as_written


def check_processes(result: Result, run: Run) -> None:
    """Check that a run's instances trained together, with the requested replicas, and left all records.

    Raises:
        PopRunError: If they did not.
    """
    processes = result.record.processes
    for process in processes:
        if process.instances == 1 and run.instances > 1 and not run.faults and run.resumed_on is None:
            raise PopRunError(
                f"each of the {run.instances} instances trained for itself ({process.strategy}); instances that train "
                "together use strategies.PopDistStrategy, or IPUMultiWorkerStrategy with --transports grpc"
            )
        if process.replicas != run.replicas:
            raise PopRunError(
                f"the program trained {process.replicas} replicas, but {run.replicas} were asked for; give it the same "
                "number, or verify with --num-replicas "
                f"{process.replicas}"
            )
    missing = sorted({*range(run.instances)} - {process.instance for process in processes})
    if processes and missing and result.exit_status == 0 and not run.faults:
        names = ", ".join(map(str, missing))
        raise PopRunError(
            f"{'instance' if len(missing) == 1 else 'instances'} {names} of {run} left no record where poprun looks "
            "for it; is --record-dir a directory that all hosts share, and do all instances train?"
        )
