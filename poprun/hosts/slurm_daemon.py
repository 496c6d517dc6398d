"""The program that Slurm starts in place of Open MPI's daemon, to become it and ignore a warning signal.

usage: daemon.py PATH_OF_PRTED [arguments]

`sbatch --signal=USR1@60` without `B:` sends SIGUSR1 to all processes of the steps. The daemon would end by it, and the
job with it; the agents pass it on to their programs, which save and leave.
"""

import os
import signal
import sys

if __name__ == "__main__":
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # which stays after exec; agents have a handler of their own
    os.execv(sys.argv[1], sys.argv[1:])
