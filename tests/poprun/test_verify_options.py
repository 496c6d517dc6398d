"""The words after `poprun verify`."""

from __future__ import annotations

from pathlib import Path

import pytest

from poprun.cli.command_line import CommandLine
from poprun.errors import UsageError
from poprun.verify.options import SOME_FAULT, VerifyRequest, describe_verify, read_words

PROGRAM = ("python", "train.py", "--epochs", "1")


def read(*words: str) -> VerifyRequest:
    asked = read_words(["--num-replicas=8", *words, *PROGRAM])
    assert asked is not None
    return asked


def test_options_end_where_the_program_begins():
    asked = read_words(["--num-replicas", "8", "--steps", "5", *PROGRAM, "--spreads", "2"])
    assert asked == VerifyRequest(CommandLine({"num-replicas": 8}, (*PROGRAM, "--spreads", "2")), steps=5)


def test_all_options_are_read():
    asked = read(
        "--spreads=1, 2,8,2",
        "--transports=grpc,mpi",
        "--inject=kill:instance=1,step=3",
        "--resume",
        "--certificate=c.json",
        "--record-dir=records",
        "--host=a,b",
    )
    assert asked == VerifyRequest(
        line=CommandLine({"num-replicas": 8, "host": ("a,b",)}, PROGRAM),
        spreads=(1, 2, 8),
        transports=("grpc", "mpi"),
        inject=("kill:instance=1,step=3",),
        resume=True,
        certificate=Path("c.json"),
        record_dir=Path("records"),
    )


@pytest.mark.parametrize("following", [(), ("--steps", "3")])
def test_inject_without_a_value_uses_a_default_fault(following):
    asked = read("--inject", *following)
    assert (asked.inject, asked.line.program) == ((SOME_FAULT,), PROGRAM)


def test_inject_accepts_a_separate_word():
    assert read("--inject", "stop:instance=0").inject == ("stop:instance=0",)


def test_the_default_number_of_replicas_is_the_largest_spread():
    asked = read_words(["--spreads=1,4,2", *PROGRAM])
    assert asked == VerifyRequest(CommandLine({"num-replicas": 4}, PROGRAM), spreads=(1, 4, 2))
    assert read_words(["--steps=1", *PROGRAM]).replicas == 1
    with pytest.raises(UsageError, match="names 2 instances for 3 replicas"):
        read_words(["--spreads=2,3", *PROGRAM])


def test_help_covers_the_options_of_verify():
    assert read_words(["--help"]) is None
    for option in ("--spreads", "--certificate", "--against", "--resume"):
        assert option in describe_verify()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--spreads=3"], "3 instances for 8 replicas, which must divide evenly: use some of 1,2,4,8"),
        (["--spreads=0"], "0 instances for 8 replicas"),
        (["--spreads=two"], "'two'; write numbers of instances such as 1,2,8"),
        (["--spreads=1,,2"], "write numbers of instances"),
        (["--transports=tcp"], "'tcp'; use some of mpi,ring,grpc"),
        (["--transports=grpc", "--inject"], "works over MPI, and --transports names only grpc"),
        (["--inject", "kill:instance=x"], "--inject 'kill:instance=x'"),
        (["--steps=0"], "--steps is 0; use 1 or more"),
        (["--num-instances=2"], "name them with --spreads"),
        (["--on-failure=shrink"], "use --inject"),
        (["--dry-run"], "--dry-run is not for poprun verify"),
        (["--spread=1,2", "--sprads=1"], "unknown option --sprads, did you mean --spreads"),
    ],
)
def test_an_impossible_request_is_refused(words, said):
    with pytest.raises(UsageError, match=said.replace("(", r"\(")):
        read(*words)


def test_a_program_is_needed_unless_a_certificate_names_it():
    with pytest.raises(UsageError, match="no program given; usage: poprun verify"):
        read_words(["--num-replicas=8"])
    asked = read_words(["--against=c.json", "--spreads=3"])
    assert asked is not None
    assert (asked.against, asked.spreads) == (Path("c.json"), (3,))
