import faulthandler
import sys
import tempfile
import threading

import pytest

from poprun.stacks import innermost_line

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


def test_nothing_where_there_are_too_many_threads_to_show_the_main_one():
    is_over = threading.Event()
    others = [threading.Thread(target=is_over.wait) for _ in range(101)]
    for other in others:
        other.start()
    try:
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            assert innermost_line(file.read()) == ""
    finally:
        is_over.set()
        for other in others:
            other.join()


def test_what_faulthandler_writes_while_other_threads_run():
    is_over = threading.Event()
    other = threading.Thread(target=is_over.wait)
    other.start()
    try:
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            line = sys._getframe().f_lineno - 1
            file.seek(0)
            assert innermost_line(file.read()) == f"{__file__}, line {line}, in {sys._getframe().f_code.co_name}"
    finally:
        is_over.set()
        other.join()
