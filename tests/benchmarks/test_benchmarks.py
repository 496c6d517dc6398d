"""Small, complete runs of each benchmark; the measured figures are not tested."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from horovod_installed import needs_horovod
from pages import page_text

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path.append(str(BENCHMARKS))

import hosts  # noqa: E402
import soak  # noqa: E402

LIMIT_S = 300.0  # many processes import torch or JAX, and other programs take part of the machine
COMPLETE = (pytest.mark.complete, pytest.mark.cores(2))
ON_HOSTS = (*COMPLETE, pytest.mark.cluster)
FEW = "--rounds 1 --steps 1 --batch-size 2"


def needs(library):
    return pytest.mark.skipif(find_spec(library) is None, reason=f"{library} is not installed")


needs_repository = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the repository, and another commit")
CASES = [
    ("all_reduce.py --instances 1 --sizes 1K 100000 --rounds 2 --block-s 0.001 --stream-size 64K", ()),
    ("all_reduce.py --backends mpi,grpc --sizes 4 3M --rounds 2 --block-s 0.001 --stream-size 64K", COMPLETE),
    ("all_reduce.py --backends horovod --sizes 4 100000 --rounds 2 --block-s 0.001", (*COMPLETE, needs_horovod)),
    (
        "against.py HEAD --models cnn --replicas 1 --batch-size 2 --rounds 2 --turn-s 0.01",
        (*COMPLETE, needs_repository),
    ),
    ("against_all_reduce.py HEAD --sizes 1K --rounds 2 --turn-s 0.01", (*COMPLETE, needs_repository)),
    ("checkpoint.py --instances 1 2 --model cnn --every 1 --rounds 2 --steps 3", (*COMPLETE, needs("orbax"))),
    ("ends.py --repeats 1 --only SIGSEGV", COMPLETE),
    ("feeds.py --replicas 2 " + FEW, COMPLETE),
    ("gpu.py --rows jax mlp ours n=1 --steps 2 --turn-s 0.01 --limit-s 250", ()),
    ("gpu.py --rows torch mlp n=1 --steps 2 --turn-s 0.01 --limit-s 250", (*COMPLETE, needs("torch"))),
    ("gpu.py --only bits --rows jax n=2 --limit-s 250", COMPLETE),
    ("hosts.py --hosts 2 --instances 2 --rate 1gbit --delay 0.5ms --sizes 4K --rounds 1 --block-s 0.05", ON_HOSTS),
    ("imports.py --repeats 1", (*COMPLETE, needs("torch"))),
    ("keras_fit.py --rounds 1 --steps 2", (*COMPLETE, needs("keras"))),
    ("launch.py --repeats 1", COMPLETE),
    ("output.py --instances 2 --seconds 0.2 --repeats 1", COMPLETE),
    ("local_replicas.py --replicas 1 3 --rounds 1 --steps 3", COMPLETE),
    ("transfer_dtypes.py --batch-sizes 2 --rate 1gbit --delay-ms 0.5 --rounds 1 --steps 1", ON_HOSTS),
    ("pipelines.py --layers 1 --width 4 --batch-size 2 --micro-batches 8 --rounds 1 --kept-mib 2", COMPLETE),
    ("process_group.py --sizes 4K 1M --models cnn --rounds 2", (*COMPLETE, needs("torch"))),
    ("recomputation.py --layers 4 --width 4 --batch-size 2 --rounds 1", COMPLETE),
    ("sharded_state.py --instances 2 --width 64 " + FEW, COMPLETE),
    ("simulated.py --instances 2 --sizes 64K --rounds 1 --block-s 0.05", ON_HOSTS),
    ("survival.py --model cnn --kills 1 " + FEW, COMPLETE),
    ("timeline.py --repeats 4 --events 2000 --seconds 0.3", COMPLETE),
    ("torch_steps.py --instances 1 --models mlp --rounds 1", (*COMPLETE, needs("torch"))),
    ("torch_steps.py --local-replicas 2 --models mlp --rounds 1", (*COMPLETE, needs("torch"))),
    ("torch_steps.py --pipeline --rounds 1", (*COMPLETE, needs("torch"))),
    ("train_step.py --models cnn " + FEW, COMPLETE),
    ("train_step.py --models mlp --strategy multi-worker " + FEW, COMPLETE),
    ("train_step.py --models mlp --against horovod " + FEW, (*COMPLETE, needs_horovod)),
    ("training_options.py --models cnn --rounds 1 --steps 3 --batch-size 2", COMPLETE),
]


@pytest.mark.job
@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("words", [pytest.param(words, marks=marks) for words, marks in CASES])
def test_benchmarks_run_and_write_their_figures(words, request, tmp_path):
    if request.node.get_closest_marker("cluster"):
        try:
            with hosts.hosts(2):
                pass
        except SystemExit as reason:
            pytest.skip(str(reason))
    name, *arguments = words.split()
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARKS / name), *arguments, "--json", str(figures)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout
    assert json.loads(figures.read_text())


def test_each_benchmark_has_a_case_and_a_line_in_the_documentation():
    """soak.py is the exception: the complete tier starts it."""
    sources = {path.name: path.read_text() for path in BENCHMARKS.glob("*.py") if path.name != "timing.py"}
    there = {name for name, text in sources.items() if "ArgumentParser(" in text or "command_line(" in text}
    documented = set(re.findall(r"python benchmarks/(\w+\.py)", page_text("benchmarks.md")))
    assert there == {words.split()[0] for words, _ in CASES} | {"soak.py"} == documented


def test_faults_of_the_complete_tier_have_every_kind_in_every_phase():
    script = (ROOT / "launch_scripts" / "test.sh").read_text()
    [(seed, count)] = re.findall(r"soak.py --seed (\d+) --count (\d+)", script)
    chance = random.Random(int(seed))
    cases = [soak.draw(chance) for _ in range(int(count))]
    faults = [fault for case in cases for fault in case.faults]
    assert {fault.kind for fault in faults} == set(soak.STATUS)
    assert {fault.phase for fault in faults} >= set(soak.PHASES)
    assert {case.mode for case in cases} == {"stop", "shrink", "replace"}
    assert {event.is_resize for case in cases for event in case.outside} == {True, False}
    assert any(len(case.faults) > 1 for case in cases)
