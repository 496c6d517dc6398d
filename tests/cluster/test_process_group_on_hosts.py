"""DDP and FSDP over the backend popdist on several hosts."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest
from beds import ROOT
from looping import words

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.complete,
    pytest.mark.cores(2),
    pytest.mark.timeout(500),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"),
]

FILE = str(ROOT / "tests" / "jobs" / "programs" / "train_in_groups.py")


def test_the_bits_of_three_ranks_are_the_same_on_one_host_and_on_three(hosts):
    found = []
    for names in (hosts.names[:1], hosts.names[:3]):
        done = hosts.on("h0", *words(names, 3), sys.executable, FILE, limit_s=240.0)
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line.partition(">:")[2]) for line in done.stdout.splitlines()]
        found.append({(each["ddp"], each["fsdp"]) for each in lines})
        assert len(lines) == 3
    first, other = found
    assert len(first) == 1
    assert other == first
