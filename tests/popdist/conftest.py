"""Import paths for tests of jobs, which use modules of other folders."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / folder) for folder in ("popdist/programs", "jobs", "collectives")]
