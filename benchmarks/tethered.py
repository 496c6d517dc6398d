"""Runs a program that is told to end (SIGTERM) as soon as the process that started it has ended, however that ended.

usage: tethered.py PARENT program [arguments]     (PARENT is the number of that process)
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # see prctl(2)

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):
        raise SystemExit("the process that started this one has ended already")
    os.execvp(sys.argv[2], sys.argv[2:])
