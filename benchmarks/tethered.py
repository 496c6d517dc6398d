"""Launcher of a program that receives SIGTERM as soon as its parent process has ended, for whatever reason.

usage: tethered.py PARENT program [arguments]     (PARENT is the parent's process ID)
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # see prctl(2)

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):
        raise SystemExit("the process that started this one has already ended")
    os.execvp(sys.argv[2], sys.argv[2:])
