"""The failures of the complete tier, of which the seed and the number are chosen in test.sh."""

from __future__ import annotations

import random
import re
import sys

from benchmark_runs import BENCHMARKS, ROOT

sys.path.append(str(BENCHMARKS))

import soak  # noqa: E402


def test_those_of_the_complete_tier_are_of_every_kind_in_every_phase():
    script = (ROOT / "launch_scripts" / "test.sh").read_text()
    [(seed, count)] = re.findall(r"soak.py --seed (\d+) --count (\d+)", script)
    chance = random.Random(int(seed))
    cases = [soak.draw(chance) for _ in range(int(count))]
    faults = [fault for case in cases for fault in case.faults]
    assert {kind for kind, *_ in faults} == set(soak.STATUS)
    assert {phase for *_, phase in faults} == set(soak.PHASES)
    assert {case.mode for case in cases} == {"stop", "shrink"}
    assert any(len(case.faults) > 1 for case in cases)
