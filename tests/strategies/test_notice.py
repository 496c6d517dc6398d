"""Word that reaches all instances at the same step."""

from strategies.step.metrics import StepNotice


def test_nothing_is_given_before_anyone_gives_it():
    notice = StepNotice()
    assert (notice.is_given, notice.number, notice.is_agreed) == (False, 0, False)


def test_what_is_given_here_is_not_agreed_before_a_step_has_carried_it():
    notice = StepNotice()
    notice.give(15)
    assert (notice.is_given, notice.number, notice.is_agreed) == (True, 15, False)


def test_a_single_replica_is_enough_whoever_it_was_given_to():
    notice = StepNotice()
    notice.agree(1 / 1024)
    assert (notice.is_given, notice.is_agreed) == (False, True)
    notice.agree(0.0)
    assert not notice.is_agreed
