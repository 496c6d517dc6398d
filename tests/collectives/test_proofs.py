"""Proofs that a worker knows the job token, without showing the token."""

from __future__ import annotations

import pytest

from collectives.errors import SecurityError
from collectives.network.security import TOKEN, Security

STATEMENT = "rank 1 looks for rank 0"


def knowing(token: str) -> Security:
    return Security.from_environ({TOKEN: token} if token else {})


def test_a_worker_with_the_token_can_prove_a_statement() -> None:
    proof = knowing("right").prove(STATEMENT)
    assert knowing("right").is_proof(proof, STATEMENT)
    assert "right" not in proof


@pytest.mark.parametrize("token", ["wrong", "right"[:-1], "right ", ""])
def test_a_worker_with_another_token_cannot_prove_a_statement(token: str) -> None:
    assert not knowing("right").is_proof(knowing(token).prove(STATEMENT), STATEMENT)


def test_a_proof_holds_for_one_statement() -> None:
    proof = knowing("right").prove(STATEMENT)
    assert not knowing("right").is_proof(proof, f"{STATEMENT}, again")
    assert not knowing("right").is_proof("", STATEMENT)


def test_without_a_token_no_proof_is_needed() -> None:
    assert knowing("").is_proof("", STATEMENT)
    assert knowing("").prove(STATEMENT) == ""


@pytest.mark.parametrize("proof", ["\xff" * 64, "\u0661", "\ud800", b"\xff" * 64, b"", "x" * 10_000], ids=ascii)
def test_a_proof_may_be_any_text_or_bytes(proof: str | bytes) -> None:
    assert not knowing("right").is_proof(proof, STATEMENT)
    assert knowing("").is_proof(proof, STATEMENT)


def test_a_proof_may_come_as_bytes() -> None:
    assert knowing("right").is_proof(knowing("right").prove(STATEMENT).encode(), STATEMENT)


@pytest.mark.parametrize("value", ["", " ", "\n"])
def test_an_empty_token_is_refused(value: str) -> None:
    with pytest.raises(SecurityError, match=f"{TOKEN} is set but empty, .*; give it a secret, or unset it"):
        Security.from_environ({TOKEN: value})
