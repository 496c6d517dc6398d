"""Output of instances: tagged, whole and complete lines, on streams and in files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid

import pytest
from poprun_jobs import LIMIT_S, MARKER, ROOT_ALLOWED, leftovers, run, start, two
from terminal_jobs import on_terminal

pytestmark = [pytest.mark.job, pytest.mark.timeout(240)]

RANK = "import os, sys, time\nrank = int(os.environ['OMPI_COMM_WORLD_RANK'])\n"


def test_both_streams_of_every_instance_are_tagged():
    finished = run(*two(RANK + "print('out', rank); print('err', rank, file=sys.stderr)"))
    assert sorted(finished.stdout.splitlines()) == ["[1,0]<stdout>:out 0", "[1,1]<stdout>:out 1"]
    assert sorted(finished.stderr.splitlines()) == ["[1,0]<stderr>:err 0", "[1,1]<stderr>:err 1"]


@pytest.mark.complete
@pytest.mark.cores(2)
def test_many_instances_writing_at_once_lose_and_tear_no_line(tmp_path):
    instances, lines = 8, 3000
    program = RANK + (
        f"for n in range({lines}):\n"
        "    print(f'{rank} {n:06d}', 'x' * (n * 7 % 300))\n"
        "    if n % 100 == 50: print('note', rank, n, file=sys.stderr)\n"
    )
    count = str(instances)
    options = ["--num-instances", count, "--num-replicas", count, "--output-dir", str(tmp_path / "out")]
    finished = run(*options, sys.executable, "-c", program)
    assert finished.status == 0
    assert len(finished.stdout.splitlines()) == instances * lines
    merged = (tmp_path / "out" / "merged.log").read_text().splitlines(keepends=True)
    notes = [line for line in finished.stderr.splitlines() if " POPRUN [W] " not in line]  # there are too few cores
    assert len(merged) == len(finished.stdout.splitlines()) + len(notes)
    for rank in range(instances):
        written = "".join(f"{rank} {n:06d} {'x' * (n * 7 % 300)}\n" for n in range(lines))
        tag = f"[1,{rank}]<stdout>:"
        for shown in (finished.stdout.splitlines(keepends=True), merged):
            assert "".join(line.removeprefix(tag) for line in shown if line.startswith(tag)) == written
        assert (tmp_path / "out" / f"instance-{rank:03d}.stdout").read_text() == written
        noted = "".join(f"note {rank} {n}\n" for n in range(50, lines, 100))
        assert (tmp_path / "out" / f"instance-{rank:03d}.stderr").read_text() == noted


@pytest.mark.complete
def test_a_line_of_8_mib_comes_through_in_one_piece():
    length = (8 << 20) - 1
    finished = run(*two(RANK + f"print('ab'[rank] * {length})"))
    assert sorted(map(len, finished.stdout.splitlines())) == [length + len("[1,0]<stdout>:")] * 2
    assert {line[14:].strip(line[14]) for line in finished.stdout.splitlines()} == {""}


def test_the_last_line_needs_no_line_end():
    finished = run("--tag-host", "printf", "one\ntwo")
    tag = f"[1,0][{os.uname().nodename}]<stdout>:"
    assert finished.stdout == f"{tag}one\n{tag}two\n"


def test_standard_output_of_one_instance_is_untagged_in_a_pipe_but_standard_error_is_tagged():
    finished = run("sh", "-c", """printf '{"a":\n1}'; echo note >&2""")
    assert (finished.status, json.loads(finished.stdout)) == (0, {"a": 1})
    assert (finished.stdout, finished.stderr) == ('{"a":\n1}', "[1,0]<stderr>:note\n")


def test_a_pipe_with_both_streams_gets_tags():
    words = [sys.executable, "-m", "poprun", "echo", "Hello World"]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "timeout": LIMIT_S}
    finished = subprocess.run(words, env=os.environ | ROOT_ALLOWED, check=False, **options)
    assert (finished.returncode, finished.stdout) == (0, b"[1,0]<stdout>:Hello World\n")


def test_empty_lines_and_invalid_utf8_pass():
    job = start("printf", r"\n\303\050\n")
    job.process.wait()
    job.streams[0].close()
    assert bytes(job.streams[0]._data) == b"\n\xc3\x28\n"
    job.streams[1].close()


def test_a_prompt_without_line_end_appears():
    job = start(sys.executable, "-c", "import signal; print('name? ', end=''); signal.pause()")
    job.wait_for("name? ")
    job.process.terminate()
    assert job.finish().stdout == "name? "


def test_a_progress_bar_survives_on_a_terminal_and_in_files(tmp_path):
    program = (
        "import os, sys, time\n"
        "if os.environ['OMPI_COMM_WORLD_RANK'] == '0':\n"
        "    for n in range(20): sys.stderr.write(f'\\r{n:3d} %'); time.sleep(0.02)\n"
        "    sys.stderr.write('\\n')\n"
    )
    options = ["--num-instances", "2", "--num-replicas", "2", "--output-dir", str(tmp_path)]
    null = subprocess.DEVNULL
    status, shown = on_terminal(program, *options, stdin=null, stdout=null, stderr="terminal")
    tag = b"\x1b[0;36m[1,0]\x1b[31m<stderr>:\x1b[0m"
    assert status == 0
    assert shown == tag + b"".join(b"\r" + tag + b"%3d %%" % n for n in range(20)) + b"\r\n"
    written = b"".join(b"\r%3d %%" % n for n in range(20)) + b"\n"
    assert (tmp_path / "instance-000.stderr").read_bytes() == written
    assert b"\x1b" not in (tmp_path / "merged.log").read_bytes()
    assert (tmp_path / "merged.log").read_bytes().replace(b"[1,0]<stderr>:", b"") == written


@pytest.mark.complete
def test_files_have_every_byte_of_every_instance_even_of_silenced_ones(tmp_path):
    program = RANK + (
        "import random\n"
        "generator = random.Random(rank)\n"
        "for descriptor in (1, 2):\n"
        "    data = generator.randbytes(700_001)\n"
        f"    with open(f'{tmp_path}/{{rank}}.{{descriptor}}', 'wb') as file: file.write(data)\n"
        "    while data: data = data[os.write(descriptor, data[:9999]):]\n"
    )
    directory = tmp_path / "new" / "out"
    job = start(*two(program, "--only-output-from-instance=0", "--output-dir", str(directory)))
    assert job.process.wait(LIMIT_S) == 0
    for stream in job.streams:
        stream.close()
    for rank in (0, 1):
        for descriptor, stream in ((1, "stdout"), (2, "stderr")):
            kept = directory / f"instance-{rank:03d}.{stream}"
            assert kept.read_bytes() == (tmp_path / f"{rank}.{descriptor}").read_bytes()


def test_files_are_written_at_once_and_contain_the_cause_of_failure(tmp_path):
    program = RANK + (
        "import signal\n"
        "if rank == 0: print('at work'); signal.pause()\n"
        f"while not os.path.getsize('{tmp_path}/instance-000.stdout'): pass\n"
        "raise ValueError('no such data')\n"
    )
    finished = run(*two(program, "--output-dir", str(tmp_path)))
    assert finished.status == 1
    assert "ValueError" in (tmp_path / "instance-001.stderr").read_text()
    assert (tmp_path / "instance-000.stdout").read_text() == "at work\n"
    merged = (tmp_path / "merged.log").read_text()
    assert "[1,1]<stderr>:ValueError: no such data\n" in merged
    assert merged.splitlines()[-1] == finished.stderr.splitlines()[-1]


@pytest.mark.complete
def test_a_full_disk_costs_a_warning_but_not_the_job(tmp_path):
    program = (
        "import os\n"
        f"os.unlink('{tmp_path}/merged.log')\n"
        f"os.symlink('/dev/full', '{tmp_path}/merged.log')\n"
        "for n in range(1000): print(n)\n"
    )
    finished = run("--output-dir", str(tmp_path), sys.executable, "-c", program)
    assert finished.status == 0
    assert finished.stdout == "".join(f"{n}\n" for n in range(1000))
    (warning,) = finished.stderr.splitlines()
    assert "POPRUN [W] cannot write" in warning
    assert "No space left on device; the job goes on" in warning


def test_a_late_reader_gets_all_output(tmp_path):
    marker, begun = uuid.uuid4().hex, tmp_path / "begun"
    program = f"open({str(begun)!r}, 'x').close(); print('x' * 1_000_000); print('end')"
    process = subprocess.Popen(
        [sys.executable, "-m", "poprun", sys.executable, "-c", program],
        env=os.environ | ROOT_ALLOWED | {MARKER: marker},
        stdout=subprocess.PIPE,
    )
    while not begun.exists() or leftovers(marker).keys() != {process.pid}:  # until only poprun is left
        assert process.poll() is None
        time.sleep(0.02)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, output) == (
        0,
        b"x" * 1_000_000 + b"\nend\n",
    )


@pytest.mark.complete
@pytest.mark.cores(2)
def test_a_slow_reader_delays_the_output_but_loses_nothing():
    megabytes = 24
    program = RANK + f"for n in range({megabytes} * 1024): print(f'{{n:010d}}' + 'x' * 1013)\nprint('end')"
    job = start(sys.executable, "-c", program)
    finished = job.finish()
    assert finished.status == 0
    lines = finished.stdout.splitlines()
    assert lines[-1] == "end"
    assert [int(line[:10]) for line in lines[:-1]] == list(range(megabytes * 1024))
