"""Tests of jobs use what the tests in other folders use."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / folder) for folder in ("popdist/programs", "jobs", "collectives")]
