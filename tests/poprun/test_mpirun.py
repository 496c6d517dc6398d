"""What mpirun says, with other programs in its place."""

from __future__ import annotations

import os

import pytest

from poprun.mpirun import Mpirun


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        (r"ssh: refused\r\n\0", b"ssh: refused\n"),
        (r"one\n\ntwo", b"one\n\ntwo\n"),
        (r"\0", b""),
        ("", b""),
    ],
)
def test_its_complaint_is_made_of_whole_lines(said, complaint):
    mpirun = Mpirun(["sh", "-c", f"printf '{said}' >&2"], os.environ)
    os.waitpid(mpirun.pid, 0)
    mpirun.read_rest()
    assert mpirun.complaint == complaint
    os.close(mpirun.stdout)
    os.close(mpirun.stderr)
