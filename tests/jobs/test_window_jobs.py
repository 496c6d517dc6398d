"""Jobs whose instances add gradients on their devices and exchange them through windows.

With CPUs as devices the windows are host memory. The jobs have the bits of one process, which exchanges nothing.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import pytest
from poprun_jobs import start

import strategies

PROGRAM = Path(__file__).parent / "programs" / "surviving_training.py"
sys.path.insert(0, str(PROGRAM.parent))
from surviving_training import Training, train  # noqa: E402

strategies.IPUStrategy(8)  # JAX's devices are fixed when it starts, for the tests of other files too
REPLICAS, STEPS = 6, 3
ON_WINDOWS = {"POPDIST_EXCHANGE": "window", "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
"""One device for each process, as on instances that have or share a GPU."""

pytestmark = [pytest.mark.job, pytest.mark.cores(2), pytest.mark.timeout(200)]


@functools.cache
def alone() -> dict:
    return json.loads(json.dumps(train(strategies.IPUStrategy(REPLICAS), Training(STEPS))))


def test_two_instances_go_on_through_new_windows_when_the_third_is_lost() -> None:
    """Blocks of two replicas are nodes of the tree; blocks of three are not."""
    options = ("--num-instances=3", f"--num-replicas={REPLICAS}", "--on-failure=shrink")
    fault = "--inject=kill:instance=1,step=3,phase=forward"
    finished = start(*options, fault, sys.executable, str(PROGRAM), str(STEPS), "0", environ=ON_WINDOWS).finish()
    assert finished.status == 0, finished.stderr
    lines = [line.partition("<stdout>:")[2] for line in finished.stdout.splitlines() if "<stdout>:{" in line]
    found = [json.loads(line) for line in lines]
    assert [each["replicas"] for each in found] == [3, 3], finished.stderr
    for each in found:
        assert {name: each[name] for name in ("fingerprint", "step", "losses")} == {
            name: alone()[name] for name in ("fingerprint", "step", "losses")
        }
    assert "was killed by SIGKILL" in finished.stderr
