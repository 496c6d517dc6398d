"""The words after `poprun top`, and the message without a job."""

from __future__ import annotations

import os

import pytest

from poprun.errors import PopRunError, UsageError
from poprun.monitor.command import TOP, TopRequest, choose_job, main, read_words


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([], TopRequest()),
        (["--job", "7", "--once"], TopRequest(job=7, once=True)),
        (["--json"], TopRequest(json=True)),
        (["--plain"], TopRequest(plain=True)),
    ],
)
def test_options_are_read(words, wanted):
    assert read_words(words) == wanted


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["4711"], "takes options only, not '4711'; a job is named by --job PID"),
        (["--address", "a:1"], "unknown option --address: watch a job on another host by `ssh HOST poprun top`;"),
        (["--token=x"], "unknown option --token"),
    ],
)
def test_invalid_words_are_refused(words, message):
    with pytest.raises(UsageError, match=message):
        read_words(words)


def test_the_help_has_all_options():
    text = TOP.describe(80)
    assert [option.name for option in TOP.options if f"--{option.name}" not in text] == []
    assert max(map(len, text.splitlines())) <= 80


def test_a_missing_job_gives_one_error():
    with pytest.raises(
        PopRunError,
        match=f"no poprun with process 1 of yours runs on {os.uname().nodename}; for one on another host: ssh",
    ):
        main(["--job=1", "--once"])


def test_jobs_are_listed_apart_from_the_error(capfd):
    with pytest.raises(UsageError, match="^2 jobs of yours run here, as listed above; name one with --job PID$"):
        choose_job("/no-such-folder", [7, 11])
    heading, *rows = capfd.readouterr().err.splitlines()
    assert heading.split() == ["job", "runs", "for", "instances", "program"]
    assert [row.split(maxsplit=3) for row in rows] == [[pid, "-", "-", "it does not answer"] for pid in ("7", "11")]
