"""The hosts on which the other tests of this folder run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from beds import sweep_dead_beds

pytestmark = pytest.mark.cluster


CONNECT = """
import socket, sys, time
began_s = time.monotonic()
socket.create_connection((sys.argv[1], 2222), 2).close()
print(time.monotonic() - began_s)
"""


def test_hosts_reach_each_other_by_ssh(hosts):
    for source, target in (("h0", "h3"), ("h3", "h0"), ("h1", "h2")):
        done = hosts.on(source, "ssh", *hosts.ssh_arguments, target, "hostname")
        assert done.stdout == f"{target}\n", done.stderr


@pytest.mark.complete
def test_hosts_share_a_folder_and_have_separate_tmp_folders(hosts):
    (hosts.shared / "note").write_text("for all")
    assert hosts.on("h2", "cat", str(hosts.shared / "note")).stdout == "for all"
    hosts.on("h1", "touch", "/tmp/mine")
    assert hosts.on("h2", "ls", "/tmp/mine").returncode != 0


@pytest.mark.complete
def test_a_link_that_is_down_carries_nothing_and_recovers(hosts):
    hosts.link("h1", "down")
    assert hosts.python("h0", CONNECT, "h1").returncode == 1
    hosts.link("h1", "up")
    assert hosts.python("h0", CONNECT, "h1").returncode == 0


@pytest.mark.complete
def test_a_link_has_its_configured_delay(hosts):
    hosts.link("all", "delay=50ms")
    assert float(hosts.python("h0", CONNECT, "h1").stdout) >= 0.1  # there and back


def test_hosts_end_when_their_owner_is_killed(tmp_path):
    """The hosts hold one end of a pipe and end when the other one is closed."""
    program = (
        f"import sys, os, pathlib; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from beds import open_bed, sweep_dead_beds\n"
        f"with open_bed(pathlib.Path({str(tmp_path)!r}), 1) as bed:\n"
        "    print((bed.shared / 'state/run/h0.pid').read_text(), flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        init = owner.stdout.readline().decode().strip()
        if not init:
            pytest.skip("hosts cannot be made here")
        owner.kill()
    waiting = subprocess.run(["tail", f"--pid={init}", "-f", "/dev/null"], timeout=30, check=False)
    assert waiting.returncode == 0
    sweep_dead_beds()
    assert list(Path("/run/netns").glob(f"pd{owner.pid}x*")) == []
