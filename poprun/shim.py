"""What mpirun starts in place of each instance's program: run as a script, isolated, without site-packages.

usage: shim.py CPUS program [arguments]
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from poprun.guard import guard_program  # noqa: E402

if __name__ == "__main__":
    sys.exit(guard_program(sys.argv[1], sys.argv[2:], dict(os.environ)))
