import subprocess
import sys

import pytest

from poprun.supervisor.stacks import innermost_line

MAIN = """\
Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  File "/home/me/loader.py", line 5 in load

Current thread 0x00007f02 (most recent call first):
  File "/venv/lib/python3.11/site-packages/jax/core.py", line 7 in bind
  File "/home/me/my train.py", line 31 in forward
  File "/home/me/my train.py", line 80 in <module>
"""


def test_the_innermost_line_of_the_program_in_the_main_thread():
    assert innermost_line(MAIN) == "/home/me/my train.py, line 31, in forward"


def test_a_program_on_the_command_line():
    assert innermost_line('Current thread 0x1 (most recent call first):\n  File "<string>", line 3 in f\n') == (
        "<string>, line 3, in f"
    )


def test_where_there_are_only_libraries_the_innermost_of_them():
    stack = 'Current thread 0x1 (most recent call first):\n  File "/usr/lib/python3.11/runpy.py", line 88 in _run\n'
    assert innermost_line(stack) == "/usr/lib/python3.11/runpy.py, line 88, in _run"


@pytest.mark.parametrize("stack", ["", "\n", "Current thread 0x1 (most recent call first):\n  <no Python frame>\n"])
def test_nothing_where_no_line_is_shown(stack):
    assert innermost_line(stack) == ""


DUMPING = """\
import faulthandler, sys, threading
is_over = threading.Event()
others = [threading.Thread(target=is_over.wait) for _ in range(int(sys.argv[1]))]
for other in others:
    other.start()
faulthandler.dump_traceback(sys.stdout, all_threads=True)
is_over.set()
"""


@pytest.mark.parametrize(("others", "line"), [(1, "<string>, line 6, in <module>"), (101, "")])
def test_what_faulthandler_writes_while_other_threads_run(others, line):
    """It shows a hundred threads, the newest first."""
    dump = subprocess.run([sys.executable, "-c", DUMPING, str(others)], capture_output=True, text=True, check=True)
    assert innermost_line(dump.stdout) == line
