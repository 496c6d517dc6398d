"""Who is taken for another worker: the one process that says hello in its name and listens at its address."""

from __future__ import annotations

import pytest

from collectives.network.claims import Claim, digest_incarnation
from collectives.network.hello import Refusal

RIGHT, WRONG = "0123456789abcdef", "fedcba9876543210"


def reason_of(claim: Claim, incarnation: str) -> tuple[str, bool]:
    """Why somebody is refused, and whether that is final."""
    with pytest.raises(Refusal) as caught:
        claim.greet(incarnation, "rank 1", "train.py of alice")
    return caught.value.reason, caught.value.is_final


@pytest.fixture
def claim() -> Claim:
    return Claim()


@pytest.fixture
def settled(claim: Claim) -> Claim:
    claim.greet(RIGHT, "rank 1")
    assert not claim.answer(digest_incarnation(RIGHT))
    return claim


def test_a_hello_alone_settles_nothing(claim: Claim) -> None:
    claim.greet(RIGHT, "rank 1")
    assert claim.is_held_by(RIGHT)
    assert not claim.is_settled


def test_an_answer_alone_settles_nothing(claim: Claim) -> None:
    assert not claim.answer(digest_incarnation(RIGHT))
    assert not claim.is_settled


def test_hello_and_answer_of_one_process_settle_it(settled: Claim) -> None:
    assert settled.is_settled


def test_the_answer_may_come_first(claim: Claim) -> None:
    claim.answer(digest_incarnation(RIGHT))
    claim.greet(RIGHT, "rank 1")
    assert claim.is_settled


def test_the_answer_does_not_show_the_number() -> None:
    assert RIGHT not in digest_incarnation(RIGHT)
    assert digest_incarnation(RIGHT) != digest_incarnation(WRONG)


def test_who_said_hello_has_to_go_when_another_process_answers(claim: Claim) -> None:
    claim.greet(WRONG, "rank 1")
    assert claim.answer(digest_incarnation(RIGHT))
    assert not claim.is_held_by(WRONG)
    claim.greet(RIGHT, "rank 1")
    assert claim.is_settled


def test_somebody_else_is_refused_for_good_once_it_is_settled(settled: Claim) -> None:
    reason = "rank 1 is taken by another process, train.py of alice; give each worker an index of its own"
    assert reason_of(settled, WRONG) == (reason, True)
    assert reason_of(settled, "") == (reason, True)
    assert settled.is_held_by(RIGHT)


@pytest.mark.parametrize("comes_first", ["hello", "answer"])
def test_somebody_else_may_ask_again_before_it_is_settled(claim: Claim, comes_first: str) -> None:
    """It may be the right one, after one that was killed or never was."""
    claim.greet(WRONG, "rank 1") if comes_first == "hello" else claim.answer(digest_incarnation(WRONG))
    assert not reason_of(claim, RIGHT)[1]


def test_a_second_hello_of_the_same_process_is_refused_while_the_first_lasts(settled: Claim) -> None:
    assert reason_of(settled, RIGHT) == ("rank 1 has said hello already", False)


def test_the_place_of_one_that_has_gone_is_free(settled: Claim) -> None:
    settled.leave(RIGHT)
    settled.hang_up()
    settled.greet(WRONG, "rank 1")
    assert not settled.answer(digest_incarnation(WRONG))
    assert settled.is_settled


def test_only_who_holds_the_place_can_leave_it(settled: Claim) -> None:
    settled.leave(WRONG)
    assert settled.is_held_by(RIGHT)


def test_when_it_is_over_nobody_comes_any_more(settled: Claim) -> None:
    settled.is_over = True
    settled.leave(RIGHT)
    assert reason_of(settled, WRONG)[1]


@pytest.mark.parametrize("number", ["", "\xff" * 16, "x" * 1000])
def test_a_number_may_be_anything_that_somebody_sends(settled: Claim, number: str) -> None:
    assert not settled.is_held_by(number)
    assert not Claim().is_held_by(number)
