"""The words after `poprun top`, and the message without a job."""

from __future__ import annotations

import os

import pytest

from poprun.errors import PopRunError, UsageError
from poprun.monitor.command import OPTIONS, TopRequest, choose_job, describe, main, read_words
from poprun.monitor.doors import TOKEN_VARIABLE


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([], TopRequest()),
        (["--job", "7", "--once"], TopRequest(job=7, once=True)),
        (["--address=[::1]:70", "--json"], TopRequest(address=("::1", 70), json=True)),
        (["--plain"], TopRequest(plain=True)),
        (["-h"], None),
    ],
)
def test_options_are_read(words, wanted):
    assert read_words(words) == wanted


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["4711"], "takes options only, not '4711'; a job is named by --job PID"),
        (["--job=1", "--address=a:1"], "both name a job; give one of them"),
        (["--address", "a"], "--address is 'a'; write HOST:PORT"),
        (["--token=x"], "unknown option --token"),
    ],
)
def test_invalid_words_are_refused(words, message):
    with pytest.raises(UsageError, match=message):
        read_words(words)


def test_the_help_has_all_options():
    text = describe(80)
    assert [option.name for option in OPTIONS if f"--{option.name}" not in text] == []
    assert max(map(len, text.splitlines())) <= 80


def test_a_missing_job_gives_one_error():
    with pytest.raises(
        PopRunError, match=f"no poprun with process 1 of yours runs on {os.uname().nodename}; for one on"
    ):
        main(["--job=1", "--once"])


def test_jobs_are_listed_apart_from_the_error(capfd):
    with pytest.raises(UsageError, match="^2 jobs of yours run here, as listed above; name one with --job PID$"):
        choose_job([(7, "no-such-door"), (11, "no-such-door")])
    heading, *rows = capfd.readouterr().err.splitlines()
    assert heading.split() == ["job", "runs", "for", "instances", "program"]
    assert [row.split(maxsplit=3) for row in rows] == [[pid, "-", "-", "it does not answer"] for pid in ("7", "11")]


def test_another_host_needs_the_token(monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(UsageError, match=f"--address needs the job's token, and {TOKEN_VARIABLE} is not set"):
        main(["--address=127.0.0.1:1", "--once"])
