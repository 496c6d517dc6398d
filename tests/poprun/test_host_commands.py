"""Concurrent commands on hosts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from poprun.hosts.ssh import HostCommand, run_commands

LIMIT_S = 60.0


def sh(text, *words):
    return ("sh", "-c", text, "sh", *words)


def run(commands, limit_s=LIMIT_S):
    return dict(run_commands(commands, os.environ, limit_s))


def test_each_command_has_its_own_input_output_and_status():
    ended = run(
        {name: HostCommand(sh("cat; echo oh >&2; exit $1", str(name)), text=f"text {name}") for name in range(3)}
    )
    assert {name: (each.status, each.out, each.err) for name, each in ended.items()} == {
        name: (name, f"text {name}", "oh\n") for name in range(3)
    }


def test_commands_run_at_the_same_time(tmp_path):
    """Each command waits for the other one."""
    os.mkfifo(tmp_path / "there")
    os.mkfifo(tmp_path / "back")
    ended = run(
        {
            "a": HostCommand(sh("echo hello >$1/there; cat $1/back", str(tmp_path))),
            "b": HostCommand(sh("cat $1/there; echo well >$1/back", str(tmp_path))),
        }
    )
    assert (ended["a"].out, ended["b"].out) == ("well\n", "hello\n")


def test_the_output_of_a_feeder_is_the_input_of_its_command():
    ended = run({"a": HostCommand(("cat",), feeder=sh("echo fed; echo from me >&2"))})["a"]
    assert (ended.status, ended.out, ended.err) == (0, "fed\n", "from me\n")


def test_a_failing_feeder_makes_the_command_fail():
    assert run({"a": HostCommand(("cat",), feeder=sh("echo half; exit 3"))})["a"].status == 3
    assert run({"a": HostCommand(sh("cat; exit 4"), feeder=sh("exit 3"))})["a"].status == 4


def test_a_feeder_ends_when_its_command_stops_reading():
    ended = run({"a": HostCommand(sh("exit 5"), feeder=("yes",))})["a"]
    assert ended.status == 5


def test_a_command_that_exceeds_the_limit_is_killed_with_its_children(monkeypatch, tmp_path):
    """The fake limit expires after the other command has ended and the child has started, so load does not matter."""
    now_s = 0.0
    monkeypatch.setattr("poprun.hosts.ssh.time", SimpleNamespace(monotonic=lambda: now_s, sleep=time.sleep))
    child = tmp_path / "child"
    slow = HostCommand(sh("sleep 300 & echo $! >$1.new; mv $1.new $1; wait", str(child)))
    iteration = run_commands({"a": slow, "b": HostCommand(("true",))}, os.environ, LIMIT_S)
    name, ended = next(iteration)
    assert (name, ended.status) == ("b", 0)
    until(child.exists)
    now_s = LIMIT_S + 1
    assert [(name, ended.status) for name, ended in iteration] == [("a", None)]
    until(lambda: is_over(child.read_text().strip()))


def until(holds):
    deadline_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def is_over(pid):
    """Return whether a process has ended, even as a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_no_command_outlives_an_iteration_that_is_given_up(tmp_path):
    commands = {
        "fast": HostCommand(("true",)),
        "slow": HostCommand(sh("echo $$ >$1; exec sleep 300", str(tmp_path / "pid"))),
    }
    with_pid = {"slow": HostCommand(sh("until [ -s $1 ]; do sleep 0.01; done", str(tmp_path / "pid")))}
    iteration = run_commands(commands, os.environ, LIMIT_S)
    assert next(iteration)[0] == "fast"
    run(with_pid)
    iteration.close()
    assert not os.path.exists(f"/proc/{(tmp_path / 'pid').read_text().strip()}")


def test_a_missing_command_is_reported():
    ended = run({"a": HostCommand(("no-such-command",))})["a"]
    assert ended.status == 127
    assert "cannot start no-such-command" in ended.err


INTERRUPTED = """
import os, signal
from poprun.hosts.ssh import HostCommand, run_commands

signal.signal(signal.SIGINT, signal.default_int_handler)
os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))
try:
    ended = dict(run_commands({"a": HostCommand(("true",))}, os.environ, 60.0))
except KeyboardInterrupt:
    print("interrupted")
else:
    print("went on with", ended)
"""


def test_ctrl_c_is_not_lost_while_a_command_is_started():
    """Python drops exceptions in functions that it calls around a fork; `logging` registers one, too."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("interrupted\n", "")
