"""Damaged files of a checkpoint, without orbax."""

import hashlib
import os
import socket

import pytest

from strategies.checkpoints.checkpoint_folder import STATE
from strategies.checkpoints.sealed_folders import SUMS, TRAINING, fault_of


@pytest.fixture
def checkpoint(tmp_path):
    """Provide a folder with files like those of a checkpoint, and their digests."""
    contents = {f"{STATE}/d/0": bytes(range(256)) * 9, f"{STATE}/empty": b"", TRAINING: b'{"step": 3}\n'}
    lines = []
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
        lines.append(f"{hashlib.sha256(content).hexdigest()}  {name}\n")
    (tmp_path / SUMS).write_text("".join(lines))
    return tmp_path


def test_a_checkpoint_with_unchanged_files_is_intact(checkpoint):
    assert fault_of(checkpoint) == ""


@pytest.mark.parametrize("name", [f"{STATE}/d/0", TRAINING])
@pytest.mark.parametrize("place", [0, 5, -1])
def test_a_file_of_which_one_bit_has_changed_is_named(checkpoint, name, place):
    content = bytearray((checkpoint / name).read_bytes())
    content[place] ^= 1
    (checkpoint / name).write_bytes(content)
    assert fault_of(checkpoint) == f"{name} has changed since it was written"


@pytest.mark.parametrize("name", [f"{STATE}/d/0", TRAINING])
def test_a_file_that_is_cut_off_or_longer_is_named(checkpoint, name):
    whole = (checkpoint / name).read_bytes()
    for other in (b"", whole[:-1], whole + b"\0"):
        (checkpoint / name).write_bytes(other)
        assert fault_of(checkpoint) == f"{name} has changed since it was written"


@pytest.mark.parametrize("name", [f"{STATE}/empty", TRAINING])
def test_a_file_that_is_missing_is_named(checkpoint, name):
    (checkpoint / name).unlink()
    assert fault_of(checkpoint) == f"{name} cannot be read: No such file or directory"


def test_truncated_or_missing_digests_are_a_fault(checkpoint):
    lines = (checkpoint / SUMS).read_text().splitlines(keepends=True)
    (checkpoint / SUMS).write_text("".join(lines[:-1]))
    assert fault_of(checkpoint) == f"{SUMS} is cut off"
    (checkpoint / SUMS).unlink()
    assert fault_of(checkpoint).startswith(f"{SUMS} cannot be read: ")


@pytest.mark.parametrize("name", [f"{STATE}/empty", TRAINING])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_pipe_or_folder_in_the_place_of_a_file_is_not_opened(checkpoint, name, make):
    (checkpoint / name).unlink()
    make(checkpoint / name)
    assert fault_of(checkpoint) == f"{SUMS} names {name!r}, which is not a file of the checkpoint"


def test_a_pipe_in_the_place_of_the_digests_is_not_waited_for(checkpoint):
    (checkpoint / SUMS).unlink()
    os.mkfifo(checkpoint / SUMS)
    assert fault_of(checkpoint) == f"{SUMS} cannot be read: it is not a regular file"


@pytest.mark.parametrize("name", ["pipe", f"{STATE}/d/pipe"])
def test_an_unexpected_pipe_is_named(checkpoint, name):
    """orbax opens every file that it finds."""
    os.mkfifo(checkpoint / name)
    assert fault_of(checkpoint) == f"{name} is neither a file nor a folder"


def test_a_socket_in_the_place_of_a_file_is_named(checkpoint, monkeypatch):
    monkeypatch.chdir(checkpoint)
    with socket.socket(socket.AF_UNIX) as one:
        one.bind("socket")
        assert fault_of(checkpoint) == "socket is neither a file nor a folder"


@pytest.mark.parametrize("name", ["../outside", "/{}/outside", "state/../../outside", "state/link", "pipe", "a\0b", ""])
def test_digests_of_files_outside_the_checkpoint_are_a_fault(tmp_path, checkpoint, name):
    """Such files are not opened: reading a pipe would never end."""
    (tmp_path.parent / "outside").write_bytes(b"")
    (checkpoint / STATE / "link").symlink_to(tmp_path.parent / "outside")
    os.mkfifo(checkpoint / "pipe")
    name = name.format(tmp_path.parent)
    with (checkpoint / SUMS).open("a") as sums:
        sums.write(f"{hashlib.sha256(b'').hexdigest()}  {name}\n")
    assert fault_of(checkpoint) == f"{SUMS} names {name!r}, which is not a file of the checkpoint"


def test_a_checkpoint_can_lie_behind_a_link(tmp_path, checkpoint):
    (tmp_path.parent / "link to it").symlink_to(checkpoint)
    assert fault_of(tmp_path.parent / "link to it") == ""
