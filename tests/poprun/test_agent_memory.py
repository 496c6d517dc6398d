"""How much memory the program of an instance has, as its agent sees it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

from poprun.agent.process_statistics import LOOK_S, MemoryUse

MIB = 2**20


def test_of_this_process_is_what_the_kernel_says():
    held = bytearray(os.urandom(1)) * (64 * MIB)
    now, most = MemoryUse().look(os.getpid(), 0.0)
    assert len(held) < now <= most
    assert most <= 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + 64 * MIB


def test_the_kernel_is_asked_once_a_second():
    memory = MemoryUse()
    now, most = memory.look(os.getpid(), 5.0)
    assert memory.look(2**22 + 1, 5.0 + LOOK_S / 2) == (now, most)
    assert memory.look(2**22 + 1, 5.0 + LOOK_S) == (0, most), "no process has that number"


def test_the_most_of_a_process_is_known_at_its_end_also_if_nobody_looked():
    held = f"import os; held = os.urandom({100 * MIB})"
    with subprocess.Popen([sys.executable, "-c", held]) as process:
        _, _, used = os.wait4(process.pid, 0)
        process.returncode = 0
    memory = MemoryUse()
    memory.note_end(used.ru_maxrss)
    assert memory.look(process.pid, 0.0)[1] > 100 * MIB
