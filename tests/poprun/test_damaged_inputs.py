"""Damaged and absurd configurations, certificates and snapshots: each gives one line of error, or no harm."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from damage import ODD, damaged

from poprun.cli.command_line import read_command_line, settings_from
from poprun.cli.config import format_config, import_config, read_trusted
from poprun.cli.launch_options import OPTIONS
from poprun.errors import UsageError
from poprun.monitor.picture import picture_of
from poprun.monitor.snapshot import RUNNING, Seen, Snapshot
from poprun.verify.certificate import read_certificate

SEEDS = [0, pytest.param(1, marks=pytest.mark.complete)]
DEEP, LONG = b"[" * 100_000, b"9" * 10_000
CONFIG = format_config(read_command_line(["-n", "2", "--mpi-local-args=-x A", "--inject", "kill:instance=1", "p"]))
SEEN = Seen(0, "node0", 77, RUNNING, "exchange", 0.2, 12, 10.0, 640.0, 0.25, (1,), 0.125, 50 << 20, 60 << 20)
SNAPSHOT = Snapshot(4711, "node0", ("python", "train.py"), 65.0, instances=(SEEN, Seen(1)))
VALUES = ("1", "-1", "nan", "inf", "true", "''", "{}", "[1]", "1979-05-27", "'''a\nb'''", '"\\u0000"', "'9'")


def is_refused(path: Path, data: bytes) -> bool:
    """Return whether a configuration is refused with one line that fits a terminal."""
    path.write_bytes(data)
    try:
        settings_from(import_config(read_command_line(["--import-config", str(path), "p"])))
    except UsageError as error:
        said = str(error)
    else:
        return False
    assert "\n" not in said
    assert len(said) < 600
    return True


@pytest.mark.parametrize("seed", SEEDS)
def test_a_damaged_configuration_is_read_or_refused_in_one_line(tmp_path: Path, seed: int) -> None:
    refused = [is_refused(tmp_path / "c.toml", data) for data in damaged(CONFIG.encode(), 100, seed)]
    assert sum(refused) > 70, "the rest has another word, or a comment"


@pytest.mark.parametrize("data", [b"a = " + DEEP, b"num-instances = " + LONG, b'"a\\nb" = 1', b"\xff"])
def test_a_configuration_that_overwhelms_a_parser_is_refused_in_one_line(tmp_path: Path, data: bytes) -> None:
    assert is_refused(tmp_path / "c.toml", data)


def test_a_key_with_a_value_of_another_type_is_read_or_refused_in_one_line(tmp_path: Path) -> None:
    for number, option in enumerate(OPTIONS):
        for value in VALUES[number % 3 :: 3]:
            is_refused(tmp_path / "c.toml", f"{option.name} = {value}".encode())


def test_an_endless_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poprun.cli.config._MOST_CHARACTERS", 1000)
    with pytest.raises(UsageError, match="has 1000 characters or more; name the right file"):
        read_trusted(Path("/dev/zero"), "configuration")


def certificate() -> dict[str, object]:
    step = {"training": 0, "step": 0, "fingerprint": "a", "batch": ["b"], "update": []}
    names = {"start": [], "batch": ["x"], "gradients": [], "metrics": [], "update": [], "fingerprint": ["loss"]}
    facts = {"format": 1, "program": ["p"], "options": {}, "replicas": 2, "steps": 1, "spreads": [1], "runs": ["1"]}
    return facts | {"transports": ["window"], "facts": [{"a": "b"}], "names": [names], "record": [step]}


def read(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    try:
        read_certificate(path)
    except UsageError as error:
        said = str(error)
    else:
        return
    assert "\n" not in said
    assert len(said) < 600


@pytest.mark.parametrize("seed", SEEDS)
def test_a_damaged_certificate_is_refused_in_one_line(tmp_path: Path, seed: int) -> None:
    for data in (*damaged(json.dumps(certificate()).encode(), 100, seed), DEEP, LONG):
        read(tmp_path / "c.json", data)
    for name in certificate():
        for odd in ODD:
            read(tmp_path / "c.json", json.dumps(certificate() | {name: odd}).encode())


def look(data: bytes) -> bool:
    """Return whether a snapshot can be drawn."""
    try:
        snapshot = Snapshot.unpack(data)
    except ValueError as error:
        said = str(error)
    else:
        assert all(picture_of(snapshot, columns, 20).text() for columns in (None, 80, 40))
        assert snapshot.pack()
        return True
    assert "\n" not in said
    assert len(said) < 600
    return False


@pytest.mark.parametrize("seed", SEEDS)
def test_a_damaged_snapshot_is_drawn_or_refused_in_one_line(seed: int) -> None:
    shown = [look(data) for data in damaged(SNAPSHOT.pack(), 100, seed)]
    assert sum(shown) < 40, "only what turned a letter or a digit into another one"
    assert not any(map(look, (DEEP, LONG, b"", b"\xff", b"3")))


def test_an_absurd_snapshot_is_drawn_or_refused_in_one_line() -> None:
    chance = random.Random(0)
    for odd in ODD:
        whole = json.loads(SNAPSHOT.pack())
        for part in (whole, whole["instances"][0]):
            for name in (*part, "new"):
                changed = json.loads(SNAPSHOT.pack())
                (changed if part is whole else changed["instances"][chance.randrange(2)])[name] = odd
                look(json.dumps(changed).encode())
