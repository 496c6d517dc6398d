"""A job of a user who is not root, on hosts that know the user."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from beds import Bed, open_bed

pytestmark = [pytest.mark.cluster, pytest.mark.complete, pytest.mark.timeout(170)]

USER, NUMBER = "popdist-tester", "12345"
ENTRIES = {
    "passwd": f"{USER}:x:{NUMBER}:{NUMBER}::/tmp:/bin/sh\n",
    "group": f"{USER}:x:{NUMBER}:\n",
    "shadow": f"{USER}:*:19000:0:99999:7:::\n",
}
WHO = "import os, popdist; popdist.init(); print(os.getuid(), os.uname().nodename); popdist.synchronize()"


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    """Provide two hosts with an additional user, in a folder that everybody may enter; the machine itself does not
    change.
    """
    with tempfile.TemporaryDirectory(prefix="popdist-user-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        files = folder / "overlay" / "etc"
        files.mkdir(parents=True)
        for file, entry in ENTRIES.items():
            original = Path("/etc", file)
            (files / file).write_text((original.read_text() if os.access(original, os.R_OK) else "") + entry)
        (folder / "bed").mkdir()
        with open_bed(folder / "bed", 2, OVERLAY=str(files.parent), SSH_USER=USER) as hosts:
            yield hosts


def test_a_plain_user_can_run_a_job_on_two_hosts(bed: Bed) -> None:
    become = ["setpriv", f"--reuid={NUMBER}", f"--regid={NUMBER}", "--clear-groups"]
    job = ["--host", "h0,h1", "--num-instances", "2", "--num-replicas", "2", "--process-placement", "disabled"]
    environ = {"HOME": "/tmp", "XDG_CACHE_HOME": "/tmp/cache", "PYTHONDONTWRITEBYTECODE": "1"}
    if bed.on("h0", *become, "sh", "-c", f'test -x "$(readlink -f {sys.executable})"').returncode:
        pytest.skip(f"only root can run {sys.executable}; make the environment with an interpreter that all can run")
    words = [*become, sys.executable, "-m", "poprun", *job, sys.executable, "-c", WHO]
    done = bed.on("h0", *words, limit_s=120.0, **environ)
    assert done.returncode == 0, done.stderr
    assert sorted(line.partition(":")[2] for line in done.stdout.splitlines()) == [f"{NUMBER} h0", f"{NUMBER} h1"]
