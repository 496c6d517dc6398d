"""Lines are tagged with their instance, whole, and complete."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid

import pytest
from poprun_jobs import LIMIT_S, MARKER, ROOT_ALLOWED, leftovers, run, start, two

pytestmark = [pytest.mark.job, pytest.mark.timeout(60)]

RANK = "import os, sys, time\nrank = int(os.environ['OMPI_COMM_WORLD_RANK'])\n"


def test_any_program_can_be_run():
    finished = run("echo", "Hello World")
    assert (finished.status, finished.stdout, finished.stderr) == (0, "[1,0]<stdout>:Hello World\n", "")


def test_both_streams_of_every_instance_are_tagged():
    finished = run(*two(RANK + "print('out', rank); print('err', rank, file=sys.stderr)"))
    assert sorted(finished.stdout.splitlines()) == ["[1,0]<stdout>:out 0", "[1,1]<stdout>:out 1"]
    assert sorted(finished.stderr.splitlines()) == ["[1,0]<stderr>:err 0", "[1,1]<stderr>:err 1"]


def test_long_lines_written_fast_are_neither_torn_nor_lost():
    lines, length = 300, 20_011
    program = RANK + (
        f"for n in range({lines}):\n"
        f"    line = f'{{n:06d}} ' + 'ab'[rank] * {length} + '\\n'\n"
        "    for start in range(0, len(line), 4096): os.write(1, line[start:start + 4096].encode())\n"
    )
    finished = run(*two(program))
    assert finished.status == 0
    shown = finished.stdout.splitlines()
    assert len(shown) == 2 * lines
    for rank, letter in enumerate("ab"):
        mine = [line for line in shown if line.startswith(f"[1,{rank}]")]
        assert mine == [f"[1,{rank}]<stdout>:{n:06d} {letter * length}" for n in range(lines)]


def test_the_last_line_needs_no_end():
    finished = run("printf", "one\ntwo")
    assert finished.stdout == "[1,0]<stdout>:one\n[1,0]<stdout>:two\n"


def test_empty_lines_and_bytes_that_are_no_text_pass():
    job = start("printf", r"\n\303\050\n")
    job.process.wait()
    job.streams[0].close()
    assert bytes(job.streams[0]._data) == b"[1,0]<stdout>:\n[1,0]<stdout>:\xc3\x28\n"
    job.streams[1].close()


def test_a_line_appears_as_soon_as_it_is_whole():
    job = start(*two(RANK + "print('ready', rank)\nimport signal; signal.pause()"))
    job.wait_for("[1,0]<stdout>:ready 0\n")
    job.wait_for("[1,1]<stdout>:ready 1\n")
    job.process.terminate()
    assert job.finish().status == 143


def test_a_prompt_without_line_end_appears_too():
    job = start(sys.executable, "-c", "import signal; print('name? ', end=''); signal.pause()")
    job.wait_for("[1,0]<stdout>:name? ")
    job.process.terminate()
    assert job.finish().stdout == "[1,0]<stdout>:name? \n"


def test_a_progress_bar_is_shown_while_it_moves():
    program = (
        "import sys, time\n"
        "for n in range(40): sys.stdout.write(f'\\r{n:3d} %'); sys.stdout.flush(); time.sleep(0.02)\n"
        "sys.stdout.write('\\n')\n"
        "sys.stdin.close()\n"
    )
    finished = run(sys.executable, "-c", program)
    states = re.findall(r"\r\[1,0\]<stdout>:( *\d+) %", finished.stdout)
    assert [int(state) for state in states] == list(range(40))


def test_only_one_instance_is_heard():
    finished = run(*two(RANK + "print('out', rank); print('err', rank, file=sys.stderr)"), environ={})
    assert "[1,1]" in finished.stdout
    program = RANK + "print('out', rank); print('err', rank, file=sys.stderr)"
    finished = run(*two(program, "--only-output-from-instance", "1"))
    assert (finished.stdout, finished.stderr) == ("[1,1]<stdout>:out 1\n", "[1,1]<stderr>:err 1\n")


def test_the_last_errors_of_a_silenced_instance_that_fails_are_shown():
    program = RANK + (
        "if rank == 1:\n"
        "    print('quiet')\n"
        "    for n in range(100): print('note', n, file=sys.stderr)\n"
        "    raise ValueError('no such data')\n"
        "import signal; signal.pause()\n"
    )
    finished = run(*two(program, "--only-output-from-instance=0"))
    assert finished.status == 1
    assert finished.stdout == ""
    assert finished.stderr.count("[1,1]<stderr>:ValueError: no such data") == 1
    assert "[1,1]<stderr>:note 99\n" in finished.stderr
    assert "[1,1]<stderr>:note 9\n" not in finished.stderr
    assert finished.own_lines[0].startswith("instance 1 on host")


def test_a_reader_that_comes_late_finds_everything():
    marker = uuid.uuid4().hex
    program = "print('x' * 1_000_000); print('end')"
    process = subprocess.Popen(
        [sys.executable, "-m", "poprun", sys.executable, "-c", program],
        env=os.environ | ROOT_ALLOWED | {MARKER: marker},
        stdout=subprocess.PIPE,
    )
    while leftovers(marker).keys() != {process.pid}:  # only poprun itself is left
        assert process.poll() is None
    output, _ = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, output) == (
        0,
        b"[1,0]<stdout>:" + b"x" * 1_000_000 + b"\n[1,0]<stdout>:end\n",
    )


def test_a_slow_reader_delays_the_output_but_loses_nothing():
    megabytes = 24
    program = RANK + f"for n in range({megabytes} * 1024): print(f'{{n:010d}}' + 'x' * 1013)\nprint('end')"
    job = start(sys.executable, "-c", program)
    finished = job.finish()
    assert finished.status == 0
    lines = finished.stdout.splitlines()
    assert lines[-1] == "[1,0]<stdout>:end"
    assert [int(line[14:24]) for line in lines[:-1]] == list(range(megabytes * 1024))
