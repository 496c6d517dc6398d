"""The output of mpirun, with other programs in its place."""

from __future__ import annotations

import os

import pytest

from poprun.supervisor.mpirun import Mpirun


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        (r"ssh: refused\r\n\0", b"ssh: refused\n"),
        (r"one\n\ntwo", b"one\n\ntwo\n"),
        (r"\0", b""),
        ("", b""),
    ],
)
def test_the_complaint_of_mpirun_consists_of_whole_lines(said, complaint):
    mpirun = Mpirun(["sh", "-c", f"printf '{said}' >&2"], os.environ, lambda _: None)
    while mpirun.status is None:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        mpirun.reap()
    mpirun.read_rest()
    assert (mpirun.status, mpirun.complaint) == (0, complaint)
    os.close(mpirun.stdout)
    os.close(mpirun.stderr)
