"""Memory of a PyTorch training: it is not returned to the kernel after each step; tests count page faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from strategies.torch.tensors import keep_freed_memory

PROGRAM = """
import json, resource, statistics, sys
import torch
import strategies, strategies.torch

def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

module = torch.nn.Sequential(torch.nn.Conv2d(1, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8 * 26 * 26, 8))
batch = torch.ones(2048, 1, 28, 28)
if sys.argv[1] == "Trainer":
    trainer = strategies.torch.Trainer(
        strategies.IPUStrategy(1), module, lambda module, x: module(x).square().mean(),
        torch.optim.SGD(module.parameters(), 1e-9),
    )
    step = lambda: trainer.step(batch)
else:
    model = strategies.torch.DistributedModel(module, strategies.IPUStrategy(1))
    step = lambda: model(batch).square().mean().backward()
counts = []
for _ in range(13):
    before = pages()
    step()
    counts.append(pages() - before)
print(json.dumps(statistics.median(counts[4:])))
"""
ACTIVATIONS = 2048 * 8 * 26 * 26 * 4 // os.sysconf("SC_PAGE_SIZE")
"""Number of pages that the values kept for a backward pass take.

By default glibc maps blocks of more than 32 MiB one by one, so each step gets new pages; for smaller blocks this
depends on the memory after them. With the settings of `keep_freed_memory` a step may still get some pages, if the
memory of the step before is not free yet.
"""


def pages_of_a_step(way, **environment):
    command = [sys.executable, "-c", PROGRAM, way]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, env={**os.environ, **environment})
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.job
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are counted as Linux counts them")
class TestPages:
    @pytest.mark.parametrize("way", ["Trainer", pytest.param("DistributedModel", marks=pytest.mark.complete)])
    def test_a_step_reuses_the_pages_of_the_step_before(self, way):
        assert pages_of_a_step(way) < ACTIVATIONS / 10

    @pytest.mark.complete
    def test_pages_go_back_to_the_kernel_if_the_environment_asks_for_that(self):
        assert pages_of_a_step("Trainer", MALLOC_TRIM_THRESHOLD_="65536", MALLOC_MMAP_THRESHOLD_="65536") > ACTIVATIONS


@pytest.mark.parametrize(
    ("name", "value"), [("MALLOC_TRIM_THRESHOLD_", "1"), ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=1")]
)
def test_settings_of_the_environment_win(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert not keep_freed_memory()


HOLES = """
import torch
import strategies, strategies.torch

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])

module = torch.nn.Linear(8, 8)
trainer = strategies.torch.Trainer(
    strategies.IPUStrategy(2), module, lambda module, x: module(x).square().mean(),
    torch.optim.SGD(module.parameters(), 1e-9),
)
fallen = []
for number in range(1, 9):
    blocks = [torch.ones(1 << 18) for _ in range(64)]
    kept = blocks[::2]
    del blocks
    before = resident()
    trainer.step(torch.ones(4, 8))
    fallen.append(number) if before - resident() > 16 * (1 << 20) // 4096 else None
    del kept
print(fallen)
"""


@pytest.mark.job
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is counted as Linux counts it")
def test_steps_1_2_4_and_8_return_the_unused_pages_of_the_heap():
    command = [sys.executable, "-c", HOLES]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split("\n")[-2] == "[1, 2, 4, 8]"
