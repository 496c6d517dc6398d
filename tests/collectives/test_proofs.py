"""The token of a job is proven, not shown."""

from __future__ import annotations

import pytest

from collectives.network.security import TOKEN, Security

STATEMENT = "rank 1 looks for rank 0"


def knowing(token: str) -> Security:
    return Security.from_environ({TOKEN: token})


def test_who_knows_the_token_can_prove_a_statement() -> None:
    proof = knowing("right").prove(STATEMENT)
    assert knowing("right").is_proof(proof, STATEMENT)
    assert "right" not in proof


@pytest.mark.parametrize("token", ["wrong", "right"[:-1], "right ", ""])
def test_only_who_knows_the_token_can_prove_a_statement(token: str) -> None:
    assert not knowing("right").is_proof(knowing(token).prove(STATEMENT), STATEMENT)


def test_a_proof_holds_for_one_statement() -> None:
    proof = knowing("right").prove(STATEMENT)
    assert not knowing("right").is_proof(proof, f"{STATEMENT}, again")
    assert not knowing("right").is_proof("", STATEMENT)


def test_without_a_token_everybody_is_believed() -> None:
    assert knowing("").is_proof("", STATEMENT)
    assert knowing("").prove(STATEMENT) == ""
