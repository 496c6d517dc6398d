"""The script that mpirun starts in place of each instance's program, isolated and without site-packages.

usage: poprun/agent/__main__.py CPUS program [arguments]

Words of the program may be marked; `poprun.ipc.wire` explains why.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from poprun.agent.guard import guard_program  # noqa: E402
from poprun.ipc.wire import unmark  # noqa: E402

if __name__ == "__main__":
    # mpirun waits for this process, and taking the interpreter apart takes milliseconds
    os._exit(guard_program(sys.argv[1], [unmark(word) for word in sys.argv[2:]], dict(os.environ)))
