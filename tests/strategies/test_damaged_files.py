"""Which files of a checkpoint are taken for damaged; this needs no orbax."""

import hashlib
import os
import socket

import pytest

from strategies.checkpoint_folder import STATE, SUMS, TRAINING, fault_of


@pytest.fixture
def checkpoint(tmp_path):
    """A folder with files like those of a checkpoint, and their digests."""
    contents = {f"{STATE}/d/0": bytes(range(256)) * 9, f"{STATE}/empty": b"", TRAINING: b'{"step": 3}\n'}
    lines = []
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
        lines.append(f"{hashlib.sha256(content).hexdigest()}  {name}\n")
    (tmp_path / SUMS).write_text("".join(lines))
    return tmp_path


def test_one_whose_files_are_those_that_were_written_is_whole(checkpoint):
    assert fault_of(checkpoint) == ""


@pytest.mark.parametrize("name", [f"{STATE}/d/0", TRAINING])
@pytest.mark.parametrize("place", [0, 5, -1])
def test_a_file_of_which_one_bit_has_changed_is_named(checkpoint, name, place):
    content = bytearray((checkpoint / name).read_bytes())
    content[place] ^= 1
    (checkpoint / name).write_bytes(content)
    assert fault_of(checkpoint) == f"{name} is not what was written"


@pytest.mark.parametrize("name", [f"{STATE}/d/0", TRAINING])
def test_a_file_that_is_cut_off_or_longer_is_named(checkpoint, name):
    whole = (checkpoint / name).read_bytes()
    for other in (b"", whole[:-1], whole + b"\0"):
        (checkpoint / name).write_bytes(other)
        assert fault_of(checkpoint) == f"{name} is not what was written"


@pytest.mark.parametrize("name", [f"{STATE}/empty", TRAINING])
def test_a_file_that_is_missing_is_named(checkpoint, name):
    (checkpoint / name).unlink()
    assert fault_of(checkpoint) == f"{name} cannot be read: No such file or directory"


def test_digests_that_are_cut_off_or_missing_are_a_fault_too(checkpoint):
    lines = (checkpoint / SUMS).read_text().splitlines(keepends=True)
    (checkpoint / SUMS).write_text("".join(lines[:-1]))
    assert fault_of(checkpoint) == f"{SUMS} is cut off"
    (checkpoint / SUMS).unlink()
    assert fault_of(checkpoint).startswith(f"{SUMS} cannot be read: ")


@pytest.mark.parametrize("name", [f"{STATE}/empty", TRAINING, SUMS])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(checkpoint, name):
    (checkpoint / name).unlink()
    os.mkfifo(checkpoint / name)
    assert fault_of(checkpoint) == f"{name} cannot be read: it is no regular file"


def test_so_are_folders_and_other_things(checkpoint):
    (checkpoint / STATE / "empty").unlink()
    (checkpoint / STATE / "empty").mkdir()
    assert fault_of(checkpoint) == f"{STATE}/empty cannot be read: it is no regular file"


@pytest.mark.parametrize("name", ["pipe", f"{STATE}/d/pipe"])
def test_a_pipe_that_nobody_has_written_is_named(checkpoint, name):
    """orbax opens what it finds."""
    os.mkfifo(checkpoint / name)
    assert fault_of(checkpoint) == f"{name} is neither a file nor a folder"


def test_so_is_a_socket(checkpoint, monkeypatch):
    monkeypatch.chdir(checkpoint)
    with socket.socket(socket.AF_UNIX) as one:
        one.bind("socket")
        assert fault_of(checkpoint) == "socket is neither a file nor a folder"


def test_a_name_that_no_file_has_is_a_fault_that_can_be_printed(checkpoint):
    with (checkpoint / SUMS).open("a") as sums:
        sums.write(f"{'0' * 64}  {STATE}/a\0b\n")
    assert fault_of(checkpoint) == f"'{STATE}/a\\x00b' cannot be read: embedded null byte"
