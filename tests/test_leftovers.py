"""Search for leftovers of tests."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import leftovers
import pytest
from leftovers import SHARED_MEMORY, Lookout

BEGUN = "import os; print(os.getpid(), flush=True); input()"
"""Prints a line once it runs: a new process has no environment yet when its parent learns its number."""


@pytest.fixture
def lookout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Provide a lookout without waits that ignores shared memory of parallel tests; restore the environment
    afterwards.
    """
    monkeypatch.setattr(leftovers, "GUARD_S", 0.0)
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", tempfile.tempdir)
    for name in (leftovers.MARK, "TMPDIR", "PYTEST_DEBUG_TEMPROOT"):
        monkeypatch.setenv(name, str(os.environ.get(name, tempfile.gettempdir())))
    looking = Lookout()
    yield looking
    looking.close()


def test_nothing_is_found_if_nothing_is_left(lookout: Lookout):
    before = lookout.present()
    subprocess.run([sys.executable, "-c", ""], check=True)
    with tempfile.TemporaryFile():
        pass
    assert lookout.left_since(before) == []


def test_a_process_is_found_until_it_has_ended(lookout: Lookout):
    before = lookout.present()
    with subprocess.Popen([sys.executable, "-c", BEGUN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == process.pid
        [found] = lookout.left_since(before)
        assert found.startswith(f"process {process.pid}: ")
        process.communicate(b"\n")
    assert lookout.left_since(before) == []


def test_a_process_with_a_dead_parent_is_found(lookout: Lookout):
    before = lookout.present()
    program = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {BEGUN!r}])"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.wait()
        assert [line.partition(":")[0] for line in lookout.left_since(before)] == [f"process {pid}"]


def test_a_temporary_file_is_found(lookout: Lookout):
    before = lookout.present()
    descriptor, path = tempfile.mkstemp()
    os.close(descriptor)
    assert lookout.left_since(before) == [path]


def test_folders_without_files_do_not_count(lookout: Lookout):
    before = lookout.present()
    folder = Path(tempfile.mkdtemp()) / "session"
    folder.mkdir()
    assert lookout.left_since(before) == []
    (folder / "file").touch()
    assert lookout.left_since(before) == [str(folder.parent)]


def test_shared_memory_is_found_once_no_process_uses_it(lookout: Lookout, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", SHARED_MEMORY)
    before = lookout.present()
    path = SHARED_MEMORY / f"left-by-a-test-of-{os.getpid()}"
    memory = SharedMemory(create=True, size=1)
    try:
        assert not any(memory.name in line for line in lookout.left_since(before))
    finally:
        memory.close()
        memory.unlink()
    path.write_bytes(b"1")
    try:
        assert any(line.startswith(f"{path}, ") for line in lookout.left_since(before))
    finally:
        path.unlink()
