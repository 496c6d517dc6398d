"""Launcher of a program on one core, to which it is pinned before it starts any thread.

usage: pinned.py CPU program [arguments]     (CPU "any" does not pin)
"""

import os
import sys

if __name__ == "__main__":
    if sys.argv[1] != "any":
        os.sched_setaffinity(0, {int(sys.argv[1])})
    os.execvp(sys.argv[2], sys.argv[2:])
