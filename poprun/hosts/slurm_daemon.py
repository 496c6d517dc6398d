"""The program that Slurm starts instead of Open MPI's daemon; it ignores warning signals and becomes the daemon.

usage: daemon.py PATH_OF_PRTED [arguments]

`sbatch --signal=USR1@60` without `B:` sends SIGUSR1 to all processes of the job's steps. The signal would end the
daemon, and with it the job. The agents pass the signal on to their programs, which save and leave.
"""

import os
import signal
import sys

if __name__ == "__main__":
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # stays ignored after exec; agents set their own handlers
    os.execv(sys.argv[1], sys.argv[1:])
