"""Certificates of `poprun verify`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_verify_records import layout, process, record, step, steps

from poprun.cli.command_line import CommandLine
from poprun.errors import PopRunError, UsageError
from poprun.verify.certificate import (
    asked_again,
    certificate_of,
    changed_facts,
    check_writable,
    describe_options_of,
    read_certificate,
    shortened,
    write_certificate,
)
from poprun.verify.comparison import RunDifference, first_difference
from poprun.verify.options import VerifyRequest
from poprun.verify.records import BATCH, FINGERPRINT, GRADIENTS, START, UPDATE, record_of

RECORD = record(*steps(4), layout(0, 1), step(0, training=1), step(1, training=1))
ASKED = VerifyRequest(
    CommandLine({"num-replicas": 4, "host": ("a",)}, ("python", "train.py", "--epochs", "1")), steps=6
)


@pytest.fixture
def path(tmp_path) -> Path:
    path = tmp_path / "certificate.json"
    write_certificate(path, certificate_of(ASKED, (1, 2), ("1 x 4", "2 x 2"), RECORD))
    return path


def edit(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_a_certificate_is_read_back(path):
    certificate = read_certificate(path)
    assert certificate.program == ("python", "train.py", "--epochs", "1")
    assert (certificate.replicas, certificate.steps, certificate.spreads) == (4, 6, (1, 2))
    assert certificate.runs == ("1 x 4", "2 x 2")
    assert certificate.is_as_written
    assert list(certificate.record.steps) == list(RECORD.steps)
    assert certificate.record.steps[0, 3].fingerprint == "f3"
    assert first_difference(certificate.record, shortened(RECORD)) is None
    assert changed_facts(certificate, RECORD) == []
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_certificate_is_plain_json(path):
    content = json.loads(path.read_text())
    assert content["facts"][0]["jax"] == "0.10.2"
    assert content["facts"][0]["CPU"] == "Big"
    assert content["record"][2]["fingerprint"] == "f2"


@pytest.mark.parametrize(
    ("part", "changed"),
    [
        (START, {"start": ["other", "v0"]}),
        (BATCH, {"batch": [["other", "x2of1", "x2of2", "x2of3"]]}),
        (GRADIENTS, {"gradients": ["g2['b']", "other"]}),
        (UPDATE, {"variables": ["other", "other"]}),
    ],
)
def test_the_first_difference_is_found(path, part, changed):
    at = 0 if part == START else 2
    lines = [step(number, **(changed if number == at else {})) for number in range(4)]
    now = record(*lines, layout(0, 1), step(0, training=1), step(1, training=1))
    found = first_difference(read_certificate(path).record, shortened(now))
    assert found is not None
    assert (found.place, found.part) == ((0, at), part)


def test_changed_versions_are_found(path):
    now = record_of([process(versions={"jax": "0.11.0", "jaxlib": "0.11.0"}), layout(), *steps(4)], Path())
    changed = changed_facts(read_certificate(path), now)
    assert changed == [("jax", "0.10.2", "0.11.0"), ("jaxlib", "unset", "0.11.0")]


def test_an_edited_certificate_is_recognised(path):
    def change(content):
        content["record"][1]["fingerprint"] = "other"

    edit(path, change)
    certificate = read_certificate(path)
    assert not certificate.is_as_written
    found = first_difference(certificate.record, shortened(RECORD))
    assert found == RunDifference((0, 1), FINGERPRINT, ("",))


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.pop("names"),
        lambda content: content.update(format=2),
        lambda content: content["record"][0].pop("training"),
        lambda content: content.update(facts=[]),
        lambda content: content.update(replicas="many"),
        lambda content: content.update(record=5),
    ],
)
def test_an_invalid_certificate_is_refused(path, change):
    edit(path, change)
    with pytest.raises(UsageError, match="is not of format 1"):
        read_certificate(path)


def test_unusable_files_are_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_certificate(tmp_path / "none.json")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(UsageError, match="is not JSON"):
        read_certificate(tmp_path / "text")
    for path in (tmp_path, tmp_path / "no" / "file"):
        with pytest.raises(UsageError, match="cannot be written; check"):
            check_writable(path)
        with pytest.raises(PopRunError, match="cannot be written"):
            write_certificate(path, certificate_of(ASKED, (1,), (), RECORD))
    check_writable(tmp_path / "new.json")


class TestRepeating:
    def test_the_options_of_the_certificate_are_used(self, path):
        again = asked_again(VerifyRequest(CommandLine({}, ()), against=path), read_certificate(path))
        assert again == replace(ASKED, spreads=(1, 2), against=path)

    def test_options_on_the_command_line_win(self, path):
        given = VerifyRequest(
            CommandLine({"host": ("b",)}, ()), spreads=(4,), steps=2, transports=("ring",), against=path
        )
        again = asked_again(given, read_certificate(path))
        assert again.line == CommandLine({"num-replicas": 4, "host": ("b",)}, ASKED.line.program)
        assert (again.spreads, again.steps, again.transports) == ((4,), 2, ("ring",))

    def test_the_number_of_replicas_is_fixed(self, path):
        given = VerifyRequest(CommandLine({"num-replicas": 8}, ()), against=path)
        with pytest.raises(UsageError, match="--num-replicas is 8, but the certificate has 4"):
            asked_again(given, read_certificate(path))
        with pytest.raises(UsageError, match="3 instances for 4 replicas"):
            asked_again(VerifyRequest(CommandLine({}, ()), spreads=(3,), against=path), read_certificate(path))


def test_a_certificate_writable_by_others_is_refused(path):
    assert path.stat().st_mode & 0o777 == 0o644
    path.chmod(0o622)
    with pytest.raises(
        UsageError, match=rf"certificate {path} controls which program poprun runs, but others can write .*chmod go-w"
    ):
        read_certificate(path)


def test_the_command_that_a_certificate_starts_is_shown(path):
    certificate = read_certificate(path)
    assert (
        describe_options_of(certificate, VerifyRequest(CommandLine({}, ()), against=path))
        == "--host=a python train.py --epochs 1"
    )
    given = VerifyRequest(CommandLine({"host": ("b",)}, ("python", "mine.py")))
    assert describe_options_of(certificate, given) == ""
