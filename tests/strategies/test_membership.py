"""Collective calls with other instances on threads, some of which are lost meanwhile.

`test_surviving.py` tests whole trainings.
"""

import numpy as np
import pytest
from losing import Lost
from surviving_instances import run_instances

from collectives import (
    BrokenError,
    ClosedError,
    CollectiveTimeoutError,
    LayoutMismatchError,
    PeerLostError,
    ThreadHub,
)
from strategies.core.agreement import InstanceProgress
from strategies.core.survival import meet, surviving

REPLICAS = 6
MOST_CALLS = 10


def total(strategy):
    """Return the sum of the indices of all replicas; a collective call."""
    return int(strategy.reduce("sum", strategy.per_replica(np.int32)))


class Attempts:
    """Attempts that add up the indices of all replicas, with a record of the calls.

    Args:
        strategy: The strategy of this instance.
        disturb: Called before each attempt with its number, from 0.
        caught_up: Called with the number of the call; returns the result of `catch_up`.
    """

    def __init__(self, strategy, disturb=lambda number: None, caught_up=lambda number: None):
        self.calls = []
        self._strategy = strategy
        self._disturb = disturb
        self._caught_up = caught_up

    def attempt(self):
        self._note("attempt")
        self._disturb(self.calls.count("attempt") - 1)
        return total(self._strategy)

    def catch_up(self):
        self._note("catch up")
        return self._caught_up(self.calls.count("catch up") - 1)

    def _note(self, call):
        self.calls.append(call)
        assert len(self.calls) <= MOST_CALLS, "there is no end of it"

    def run(self):
        """Return the result, the calls, and the replicas at the end."""
        result = surviving(self._strategy.replicas, self.attempt, self.catch_up)
        return result, self.calls, list(self._strategy.local_replicas)


def raising(error, *conditions):
    """Return a function that raises an error in the first attempt or catching-up if all conditions hold."""

    def disturb(number):
        if number == 0 and all(conditions):
            raise error

    return disturb


@pytest.mark.parametrize("instances", [1, 3])
def test_without_a_loss_the_call_is_attempted_once(instances):
    found = run_instances(instances, REPLICAS, lambda strategy: Attempts(strategy).run())
    assert [each[:2] for each in found] == [(15, ["attempt"])] * instances


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_after_a_loss_survivors_attempt_the_call_once_more(lost, caplog):
    def function(strategy):
        return Attempts(strategy, raising(Lost, strategy.replicas.first_index == lost)).run()

    with caplog.at_level("INFO", "strategies.core.survival"):
        found = run_instances(3, REPLICAS, function)
    assert found.pop(lost) is None
    calls = ["attempt", "catch up", "attempt"]
    assert found == [(15, calls, [0, 1, 2]), (15, calls, [3, 4, 5])]
    messages = [record.message for record in caplog.records if record.name == "strategies.core.survival"]
    assert len(messages) == 2
    assert all(message.startswith("the instances change: ") for message in messages)


@pytest.mark.parametrize("result", [7, 0, ()])
def test_a_call_that_another_instance_completed_is_not_attempted_again(result):
    """Only the value None means that there is no result yet."""

    def function(strategy):
        return Attempts(strategy, raising(Lost, strategy.replicas.first_index == 1), lambda number: result).run()

    calls = ["attempt", "catch up"]
    assert run_instances(3, REPLICAS, function) == [(result, calls, [0, 1, 2]), None, (result, calls, [3, 4, 5])]


def test_a_call_broken_by_an_earlier_loss_is_attempted_again():
    """All instances carry on, and none is lost."""

    def function(strategy):
        return Attempts(strategy, raising(BrokenError("half-way"), strategy.replicas.first_index == 0)).run()

    calls = ["attempt", "catch up", "attempt"]
    assert run_instances(2, REPLICAS, function) == [(15, calls, [0, 1, 2]), (15, calls, [3, 4, 5])]


class TestASecondLoss:
    def test_a_second_loss_while_catching_up_makes_survivors_catch_up_again(self):
        def function(strategy):
            def caught_up(number):
                raising(Lost, strategy.replicas.first_index == 2)(number)
                meet(strategy.replicas)

            return Attempts(strategy, raising(Lost, strategy.replicas.first_index == 1), caught_up).run()

        calls = ["attempt", "catch up", "catch up", "attempt"]
        found = run_instances(4, 8, function)
        assert found == [(28, calls, [0, 1, 2, 3]), None, None, (28, calls, [4, 5, 6, 7])]

    def test_a_second_loss_during_the_next_attempt_is_handled_like_the_first(self):
        def function(strategy):
            def disturb(number):
                if strategy.replicas.first_index == number < 2:
                    raise Lost

            return Attempts(strategy, disturb).run()

        calls = [*["attempt", "catch up"] * 2, "attempt"]
        assert run_instances(3, REPLICAS, function) == [None, None, (15, calls, list(range(6)))]


class TestFinalErrors:
    @pytest.mark.parametrize(
        "error", [ValueError, LayoutMismatchError, CollectiveTimeoutError, ClosedError], ids=lambda each: each.__name__
    )
    @pytest.mark.parametrize("place", ["attempt", "catch up"])
    def test_all_other_errors_are_final(self, error, place):
        calls = []

        def function(strategy):
            if place == "attempt":
                attempts = Attempts(strategy, raising(error("mine")))
            else:
                attempts = Attempts(strategy, raising(BrokenError("half-way")), raising(error("mine")))
            calls.append(attempts.calls)
            return attempts.run()

        with pytest.raises(error, match="mine"):
            run_instances(1, REPLICAS, function)
        assert calls == [["attempt"] if place == "attempt" else ["attempt", "catch up"]]

    def test_losses_are_final_in_a_job_without_survival(self):
        calls = []

        def function(strategy):
            attempts = Attempts(strategy, raising(Lost, strategy.replicas.first_index == 0))
            calls.append(attempts.calls)
            attempts.run()

        with pytest.raises(PeerLostError, match="rank 0 is lost"):
            run_instances(2, REPLICAS, function, survives=False)
        assert calls == [["attempt"]] * 2

    def test_an_instance_given_up_by_the_others_ends(self):
        """The instance learns of that when it wants to carry on."""
        hub, said = ThreadHub(3), []

        def function(strategy):
            is_given_up = strategy.replicas.first_index == 1

            def disturb(number):
                if number == 0 and is_given_up:
                    hub.lose(1, "rank 1 was given up")

            attempts = Attempts(strategy, disturb)
            try:
                return attempts.run()
            except PeerLostError as error:
                said.append((strategy.replicas.first_index, str(error), attempts.calls))
                raise

        calls = ["attempt", "catch up", "attempt"]
        found = run_instances(3, REPLICAS, function, mechanism="ring", hub=hub)
        assert found == [(15, calls, [0, 1, 2]), None, (15, calls, [3, 4, 5])]
        assert said == [(1, "rank 1 cannot go on with the others: rank 1 was given up", ["attempt"])]


class TestMeeting:
    def test_no_instance_is_late_if_all_have_done_the_same(self):
        def function(strategy):
            strategy.replicas.done_so_far = InstanceProgress(done=2**40, share=pytest.fail)
            return meet(strategy.replicas).is_late

        assert run_instances(2, REPLICAS, function) == [False, False]

    def test_late_instances_get_the_value_of_the_first_instance_ahead(self):
        """All other instances take part in the transfer."""

        def function(strategy):
            number = strategy.instance_index
            share = strategy.broadcast
            value = np.float32(number)
            if number:
                strategy.replicas.done_so_far = InstanceProgress(done=1, share=lambda root: share(value, root))
            meeting = meet(strategy.replicas)
            return meeting.is_late, meeting.newest, float(share(value, meeting.newest)) if meeting.is_late else number

        assert run_instances(3, REPLICAS, function) == [(True, 1, 1.0), (False, 1, 1), (False, 1, 2)]

    def test_meetings_gather_passes_and_batches_of_all_in_order(self):
        def function(strategy):
            strategy.replicas.done_so_far = InstanceProgress(passes=7, batches=10 - strategy.instance_index)
            meeting = meet(strategy.replicas)
            return meeting.passes.tolist(), meeting.batches.tolist()

        assert run_instances(3, REPLICAS, function) == [([7] * 3, [10, 9, 8])] * 3

    def test_the_last_result_is_kept_for_late_instances(self):
        def function(strategy):
            shared = []

            def share(done, root):
                shared.append((done, root))

            for value in (5, 6):
                assert surviving(strategy.replicas, lambda value=value: value, lambda: None, share)
            strategy.replicas.done_so_far.share(1)
            surviving(strategy.replicas, lambda: 7, lambda: None)
            return strategy.replicas.done_so_far, shared

        assert run_instances(1, REPLICAS, function) == [(InstanceProgress(done=3), [(6, 1)])]
