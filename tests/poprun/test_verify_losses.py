"""The run of `poprun verify` that loses instances, and its course."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_verify_records import layout, process, step

from poprun.cli.command_line import CommandLine
from poprun.errors import UsageError
from poprun.verify.comparison import first_difference
from poprun.verify.losses import course_of, longest_training, obstacle_to_losses
from poprun.verify.options import VerifyRequest
from poprun.verify.records import Record, record_of
from poprun.verify.report import RunOutcome, draw_table
from poprun.verify.running import Run, choose_losses, plain_runs, run_with_losses, settings_of


def asked(replicas: int = 8, **options) -> VerifyRequest:
    values = {"num-replicas": replicas, **options.pop("values", {})}
    return VerifyRequest(CommandLine(values, ("python", "train.py")), with_losses=True, **options)


class TestTheRun:
    def test_the_chief_is_lost_first_and_the_last_instance_later(self):
        assert choose_losses(4, 9) == ("kill:instance=0,step=3", "kill:instance=3,step=6")
        assert choose_losses(3, 4) == ("kill:instance=0,step=1", "kill:instance=2,step=2")

    def test_an_instance_is_left_even_if_no_spare_joins(self):
        assert choose_losses(2, 9) == ("kill:instance=0,step=3",)

    @pytest.mark.parametrize(("steps", "at"), [(1, 0), (2, 0)])
    def test_a_short_program_loses_one_instance(self, steps, at):
        assert choose_losses(4, steps) == (f"kill:instance=0,step={at}",)

    def test_the_usual_run_has_at_most_four_instances_and_is_compared_with_one_process(self):
        assert plain_runs(asked(), (1,)) == [Run(1, 8)]
        assert run_with_losses(asked(), (1, 2, 4, 8), 9) == Run(
            4, 8, faults=("kill:instance=0,step=3", "kill:instance=3,step=6"), spares=1
        )
        run = run_with_losses(asked(7), (1, 7), 9)
        assert run is not None
        assert run.instances == 7

    def test_the_user_names_the_spread_and_the_spares(self):
        run = run_with_losses(asked(spreads=(1, 8), values={"spares": 0}), (1, 8), 9)
        assert run == Run(8, 8, faults=("kill:instance=0,step=3", "kill:instance=7,step=6"))

    def test_several_instances_are_needed(self):
        with pytest.raises(UsageError, match="--with-losses needs a run of several instances"):
            run_with_losses(asked(1), (1,), 1)
        with pytest.raises(UsageError, match="--with-losses needs shrink, which works over MPI"):
            asked(transports=("grpc",))

    def test_only_the_run_with_losses_has_spares_and_nothing_starts_again(self):
        values = {"spares": 2}
        assert settings_of(asked(values=values), Run(4, 8)).spares == 0
        lossy = settings_of(asked(values=values), Run(4, 8, faults=("kill:instance=0,step=3",), spares=2))
        assert (lossy.on_failure, lossy.spares, lossy.max_restarts) == ("replace", 2, 0)

    def test_the_number_of_steps_is_that_of_the_longest_training(self):
        lines = [layout(0, 1), step(0), *(step(number, training=1) for number in range(3))]
        assert longest_training(record_of([process(), layout(), *lines], Path())) == 3
        assert longest_training(Record()) == 0


FAULTS = ("kill:instance=0,step=1", "kill:instance=1,step=2")


def run_of(*carried: dict[int, tuple[int, int]]) -> Record:
    """Return the record of a run in which the instances drive these replicas in each step."""
    everybody = sorted({each for step_ in carried for each in step_})
    lines = []
    for each in everybody:
        lines += [process(each, 2), layout(each)]
        for number, step_ in enumerate(carried):
            if each in step_:
                lines.append(step(number, each, step_[each]))
    return record_of(lines, Path())


REPLACED = run_of({0: (0, 2), 1: (2, 4)}, {1: (2, 4), 2: (0, 2)}, {2: (0, 4)})


class TestTheCourse:
    def test_losses_and_joins_have_their_steps(self):
        course = course_of(REPLACED, Run(2, 4, faults=FAULTS, spares=1))
        assert (course.lost, course.joined) == ({0: (0, 1), 1: (0, 2)}, {2: (0, 1)})
        assert course.is_as_asked
        assert course.describe(has_trainings=False).splitlines() == [
            "instance 0 was lost in step 1",
            "instance 1 was lost in step 2",
            "spare 2 joined in step 1",
            "replicas of each instance:",
            "  steps  instance 0  instance 1  spare 2",
            "  0      0-1         2-3         -",
            "  1      -           2-3         0-1",
            "  2      -           -           0-3",
        ]
        assert first_difference(run_of({0: (0, 4)}, {0: (0, 4)}, {0: (0, 4)}), REPLACED) is None

    def test_consecutive_steps_with_the_same_instances_are_one_period(self):
        record = run_of(*[{0: (0, 2), 1: (2, 4)}] * 3, {1: (0, 4)}, {1: (0, 4)})
        said = course_of(record, Run(2, 4, faults=("kill:instance=0",))).describe(has_trainings=True)
        assert "\n  0 of training 0 to 2 of training 0  0-1         2-3\n" in said
        assert "instance 0 was lost in step 3 of training 0" in said

    def test_a_step_that_an_instance_got_from_another_one_belongs_to_the_period_before_it(self):
        record = run_of({0: (0, 2), 1: (2, 4)}, {1: (2, 4)}, {0: (0, 2), 1: (2, 4)})
        assert len(course_of(record, Run(2, 4)).periods) == 1

    def test_a_loss_that_did_not_happen_is_no_success(self):
        record = run_of({0: (0, 2), 1: (2, 4)}, {0: (0, 2), 1: (2, 4)})
        course = course_of(record, Run(2, 4, faults=("kill:instance=1,step=7",)))
        assert not course.is_as_asked
        assert "instance 1 was not lost: the fault did not happen" in course.describe(has_trainings=False)
        outcome = RunOutcome(Run(2, 4, faults=("kill:instance=1,step=7",)), record, course=course)
        assert not outcome.is_well
        assert draw_table([outcome]).endswith("equal, but not as asked")

    def test_a_delay_loses_nobody(self):
        record = run_of({0: (0, 2), 1: (2, 4)})
        assert course_of(record, Run(2, 4, faults=("delay:instance=1,step=0",))).is_as_asked

    def test_a_spare_that_did_not_join_is_no_success(self):
        record = run_of({0: (0, 2), 1: (2, 4)}, {1: (0, 4)})
        course = course_of(record, Run(2, 4, faults=FAULTS[:1], spares=1))
        assert not course.is_as_asked
        assert "1 of the spares did not take the place" in course.describe(has_trainings=False)


def test_a_program_that_cannot_go_on_says_why():
    reason = {"kind": "obstacle", "reason": "the queues of feeds stay"}
    found = obstacle_to_losses(record_of([process(), layout(), (0, reason), step(0)], Path()), spares=0)
    assert "cannot go on without a lost instance: the queues of feeds stay. Verify it without --with-losses" in found
    assert obstacle_to_losses(REPLACED, spares=1) == ""
    horovod = record_of([process(strategy="IPUHorovodStrategy"), layout(), step(0)], Path())
    assert "use PopDistStrategy" in obstacle_to_losses(horovod, spares=0)


def test_a_program_that_no_spare_can_join_goes_on_without_spares():
    reason = {"kind": "obstacle to joins", "reason": "every instance has a part of the state"}
    record = record_of([process(), layout(), (0, reason), step(0)], Path())
    assert "no spare can take the place of a lost instance: every instance has" in obstacle_to_losses(record, spares=1)
    assert obstacle_to_losses(record, spares=0) == ""
