"""The identity of a worker: a single process says hello in its name and answers at its address."""

from __future__ import annotations

import pytest

from collectives.network.claims import Claim, digest_incarnation
from collectives.network.hello import Refusal

RIGHT, WRONG = "0123456789abcdef", "fedcba9876543210"


def reason_of(claim: Claim, incarnation: str) -> tuple[str, bool]:
    """Return the reason of a refusal, and whether it is final."""
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


def test_a_hello_alone_does_not_settle_a_claim(claim: Claim) -> None:
    claim.greet(RIGHT, "rank 1")
    assert claim.is_held_by(RIGHT)
    assert not claim.is_settled


def test_an_answer_alone_does_not_settle_a_claim(claim: Claim) -> None:
    assert not claim.answer(digest_incarnation(RIGHT))
    assert not claim.is_settled


def test_hello_and_answer_of_one_process_settle_a_claim(settled: Claim) -> None:
    assert settled.is_settled


def test_the_answer_may_come_before_the_hello(claim: Claim) -> None:
    claim.answer(digest_incarnation(RIGHT))
    claim.greet(RIGHT, "rank 1")
    assert claim.is_settled


def test_the_answer_does_not_reveal_the_nonce() -> None:
    assert RIGHT not in digest_incarnation(RIGHT)
    assert digest_incarnation(RIGHT) != digest_incarnation(WRONG)


def test_an_answer_of_another_process_evicts_the_sender_of_the_hello(claim: Claim) -> None:
    claim.greet(WRONG, "rank 1")
    assert claim.answer(digest_incarnation(RIGHT))
    assert not claim.is_held_by(WRONG)
    claim.greet(RIGHT, "rank 1")
    assert claim.is_settled


def test_another_process_is_refused_finally_after_settlement(settled: Claim) -> None:
    reason = "rank 1 is taken by another process, train.py of alice; give each worker an index of its own"
    assert reason_of(settled, WRONG) == (reason, True)
    assert reason_of(settled, "") == (reason, True)
    assert settled.is_held_by(RIGHT)


@pytest.mark.parametrize("comes_first", ["hello", "answer"])
def test_another_process_may_try_again_before_settlement(claim: Claim, comes_first: str) -> None:
    """The other process may be the right one, after a killed or false one."""
    claim.greet(WRONG, "rank 1") if comes_first == "hello" else claim.answer(digest_incarnation(WRONG))
    assert not reason_of(claim, RIGHT)[1]


def test_a_second_hello_of_the_same_process_is_refused_while_the_first_lasts(settled: Claim) -> None:
    assert reason_of(settled, RIGHT) == ("rank 1 has said hello already", False)


def test_a_departed_process_frees_its_place(settled: Claim) -> None:
    settled.leave(RIGHT)
    settled.hang_up()
    settled.greet(WRONG, "rank 1")
    assert not settled.answer(digest_incarnation(WRONG))
    assert settled.is_settled


def test_only_the_holder_can_leave_the_place(settled: Claim) -> None:
    settled.leave(WRONG)
    assert settled.is_held_by(RIGHT)


def test_no_process_is_accepted_after_the_end(settled: Claim) -> None:
    settled.is_over = True
    settled.leave(RIGHT)
    assert reason_of(settled, WRONG)[1]


@pytest.mark.parametrize("number", ["", "\xff" * 16, "x" * 1000])
def test_a_nonce_may_be_any_text(settled: Claim, number: str) -> None:
    assert not settled.is_held_by(number)
    assert not Claim().is_held_by(number)
