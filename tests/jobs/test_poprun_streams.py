"""Standard streams of programs under poprun."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest
from poprun_jobs import LIMIT_S, ROOT_ALLOWED, run, start, two
from terminal_jobs import on_terminal
from tiers import also

pytestmark = [pytest.mark.job, pytest.mark.timeout(240)]

COUNT = "import os, sys\nprint(os.environ['OMPI_COMM_WORLD_RANK'], len(sys.stdin.buffer.read()))\n"


@pytest.mark.parametrize("size", [0, also(1), 3_000_001])
def test_standard_input_goes_to_instance_0_to_its_end(size):
    job = start(*two(COUNT), stdin=subprocess.PIPE)
    job.process.stdin.write(b"x" * size)
    job.process.stdin.close()
    finished = job.finish()
    assert finished.status == 0
    assert sorted(finished.stdout.splitlines()) == [f"[1,0]<stdout>:0 {size}", "[1,1]<stdout>:1 0"]


def test_unread_standard_input_does_not_block():
    job = start("head", "-c", "1", stdin=subprocess.PIPE)
    with pytest.raises(BrokenPipeError):
        job.process.stdin.write(b"x" * 10_000_000)
    with contextlib.suppress(BrokenPipeError):
        job.process.stdin.close()
    assert job.finish().stdout == "x"


def test_input_arrives_while_it_is_typed():
    job = start(sys.executable, "-c", "for _ in range(2): print('got', input())", stdin=subprocess.PIPE)
    for word in ("one", "two"):
        job.process.stdin.write(f"{word}\n".encode())
        job.process.stdin.flush()
        job.wait_for(f"got {word}")
    job.process.stdin.close()
    assert job.finish().status == 0


def test_a_closed_standard_input_is_empty():
    words = ["sh", "-c", f"exec {shlex.quote(sys.executable)} -m poprun cat <&-"]
    environ = os.environ | ROOT_ALLOWED
    finished = subprocess.run(words, env=environ, capture_output=True, timeout=LIMIT_S, check=False)
    assert (finished.returncode, finished.stdout) == (0, b"")


def test_closed_outputs_do_not_change_the_exit_status():
    words = ["sh", "-c", f"exec {shlex.quote(sys.executable)} -m poprun sh -c 'exit 7' >&- 2>&-"]
    finished = subprocess.run(words, env=os.environ | ROOT_ALLOWED, timeout=LIMIT_S, check=False)
    assert finished.returncode == 7


def test_programs_see_no_terminal_without_one():
    finished = run(sys.executable, "-c", "import sys; print(sys.stdout.isatty(), sys.stderr.isatty())")
    assert finished.stdout == "False False\n"


def test_a_stream_on_a_terminal_is_a_terminal_for_the_program():
    program = (
        "import sys\n"
        "print(sys.stdout.isatty(), sys.stderr.isatty(), file=sys.stderr)\n"
        "for n in range(3): sys.stderr.write(f'\\r{n}')\n"
    )
    null = subprocess.DEVNULL
    status, shown = on_terminal(program, environ={"NO_COLOR": "1"}, stdin=null, stdout=null, stderr="terminal")
    tag = b"[1,0]<stderr>:"
    assert status == 0
    assert shown == tag + b"False True\r\n" + tag + b"".join(b"\r" + tag + b"%d" % n for n in range(3)) + b"\r\n"


def test_the_startup_line_on_a_terminal_is_erased(tmp_path):
    """The line is erased even when it was drawn again before the job ended."""
    line, told = b"no step is completed yet: the program loads data or compiles (", tmp_path / "told"
    begins = "import os, popdist, time\npopdist.init()\n{}\nprint('begins')\n"
    program = begins.format(f"while not os.path.exists({str(told)!r}): time.sleep(0.01)")
    environ = {"NO_COLOR": "1", "TERM": "xterm"}
    streams = {"stdin": subprocess.DEVNULL, "stdout": "terminal", "stderr": "terminal"}
    status, shown = on_terminal(program, "--summary", "no", environ=environ, tell=(line, told), **streams)
    assert status == 0
    assert re.sub(rb"[^\n]*\r\x1b\[K", b"", shown) == b"[1,0]<stdout>:begins\r\n"
    quiet = environ | {"POPRUN_LOG_LEVEL": "ERROR"}
    status, shown = on_terminal(begins.format("time.sleep(2)"), environ=quiet, **streams)
    assert (status, shown) == (0, b"[1,0]<stdout>:begins\r\n")


def test_a_signal_for_the_whole_process_group_counts_once():
    program = "import os, signal\nprint('ready', flush=True)\nsignal.pause()\n"
    for number in (signal.SIGINT, signal.SIGTERM):
        job = start(*two(program), process_group=0)
        job.wait_for("ready")
        os.killpg(job.process.pid, number)
        finished = job.finish()
        assert finished.status == 128 + number
        assert number.name in finished.own_lines[-1]
