"""Writing files without following symbolic links of other users."""

import os
from pathlib import Path

import pytest

from popdist.records.private_files import open_recording, open_unless_linked
from poprun.cli.config import open_own
from poprun.output.output_files import OutputFiles
from poprun.trace.trace_events import opened
from strategies.sinks.files import CsvFile

NEW = os.O_WRONLY | os.O_CREAT
STRANGER = 12345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link to another user")


@pytest.fixture
def target(tmp_path):
    path = tmp_path / "target"
    path.write_text("mine")
    return path


def link(path: Path, target: Path, owner: int | None = None) -> Path:
    path.symlink_to(target)
    if owner is not None:
        os.lchown(path, owner, owner)
    return path


def test_a_file_gets_its_mode(tmp_path):
    os.close(open_unless_linked(tmp_path / "new", NEW, 0o640))
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o640


def test_child_processes_do_not_inherit_the_file(tmp_path):
    descriptor = open_unless_linked(tmp_path / "new", NEW)
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)


def test_own_links_are_followed(tmp_path, target):
    with open(link(tmp_path / "link", target), "w", opener=open_unless_linked) as file:
        file.write("new")
    assert target.read_text() == "new"


@needs_root
@pytest.mark.parametrize("place", ["file", "folder"])
def test_links_of_other_users_are_refused(tmp_path, target, place):
    found = link(tmp_path / "link", target if place == "file" else tmp_path, STRANGER)
    with pytest.raises(PermissionError, match=f"{found} is a symbolic link of the user with the number {STRANGER}"):
        open_unless_linked(found if place == "file" else found / "target", os.O_WRONLY | os.O_TRUNC)
    assert target.read_text() == "mine"


@needs_root
@pytest.mark.parametrize(
    "write",
    [
        lambda path: CsvFile(path).open(goes_on=False),
        open_recording,
        lambda path: open_own(path, os.O_TRUNC),
        opened,
    ],
    ids=["metrics", "recording", "configuration", "trace"],
)
def test_no_written_file_follows_a_foreign_link(tmp_path, target, write):
    with pytest.raises(PermissionError):
        write(link(tmp_path / "link", target, STRANGER))
    assert target.read_text() == "mine"


@needs_root
def test_output_behind_a_foreign_link_is_given_up_with_a_warning(tmp_path, target):
    said: list[str] = []
    files = OutputFiles(tmp_path / "output", 1, said.append)
    (tmp_path / "output/merged.log").unlink()
    link(tmp_path / "output/merged.log", target, STRANGER)
    files.merge(b"", b"words\n", b"")
    files.close()
    assert target.read_text() == "mine"
    assert "is not followed; the job goes on, but no more of its output is kept" in said[0]
