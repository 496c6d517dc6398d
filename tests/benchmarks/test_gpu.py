"""Rows and errors of benchmarks/gpu.py; no GPU is needed."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import gpu  # noqa: E402
from gpu_jobs import Effort, GpuJob, environment_of, launcher_of  # noqa: E402
from gpu_task import DDP, GPT, JAX, MLP, OURS, PLAIN, TORCH, GpuCase  # noqa: E402

FIGURES = {"queue_ms": 2.0, "read_ms": 3.0, "peak_mb": 10.0, "bits": "", "device": "cpu", "chosen": ""}


def row_of(framework=JAX, model=GPT, way=PLAIN, **values):
    case = {key: values.pop(key) for key in list(values) if key in GpuCase.__dataclass_fields__}
    return asdict(GpuCase("jax", framework, model, way, **case)) | FIGURES | values


@pytest.mark.parametrize(
    ("gpus", "paths"), [(0, {"host", "compiled"}), (1, {"host", "window"}), (2, {"host", "window", "compiled"})]
)
def test_each_possible_path_has_rows_of_exchange_and_bits(gpus, paths):
    cases = gpu.cases_of(gpus)
    for framework in (JAX, TORCH):
        for part in ("exchange", "bits"):
            there = [case for case in cases if (case.part, case.framework) == (part, framework)]
            assert {case.exchange for case in there if case.instances == 2} == paths
            assert [case.instances for case in there][0] == 1
    assert all(case.is_small == (gpus == 0) for case in cases)


def test_compiled_collectives_have_a_gpu_for_each_instance():
    assert {case.instances for case in gpu.cases_of(2) if case.exchange == "compiled"} == {2}
    assert {case.instances for case in gpu.cases_of(4) if case.exchange == "compiled"} == {2, 4}


def test_ddp_runs_only_if_each_instance_has_a_separate_device():
    assert [any(case.way == DDP for case in gpu.cases_of(gpus)) for gpus in (0, 1, 2)] == [True, False, True]


def test_the_table_fits_on_a_screen():
    assert all(len(gpu.cases_of(gpus)) <= 56 for gpus in (0, 1, 2, 8))


@pytest.mark.parametrize("room", [0.5, 1, 6])
def test_processes_of_a_wave_fit_in_memory_together(room):
    cases = gpu.cases_of(1)
    waves = list(gpu.waves(cases, room))
    assert [case for wave in waves for case in wave] == cases
    assert all(sum(map(gpu.room_of, wave)) <= room for wave in waves if len(wave) > 1)


def test_our_and_plain_programs_have_the_same_flags():
    flags = [environment_of(GpuCase("jax", JAX, MLP, way))["XLA_FLAGS"] for way in (PLAIN, OURS)]
    assert all("--xla_gpu_deterministic_ops=true" in each for each in flags)
    default = environment_of(GpuCase("jax", JAX, MLP, PLAIN, is_deterministic=False))
    assert "xla_gpu_deterministic_ops" not in default.get("XLA_FLAGS", "")


def test_poprun_starts_instances_but_not_plain_programs():
    assert launcher_of(GpuCase("jax", JAX, MLP, PLAIN)) == []
    words = launcher_of(GpuCase("jax", JAX, MLP, OURS, replicas=4, instances=2))
    assert words[words.index("--num-instances") + 1 :][:3] == ["2", "--num-replicas", "4"]


def test_a_row_compares_with_plain_programs_under_the_same_and_default_flags():
    plain, default = row_of(queue_ms=4.0), row_of(is_deterministic=False, queue_ms=2.0)
    ours = row_of(way=OURS, queue_ms=5.0, bits="0123456789")
    assert gpu.formatted(ours, [plain, default, ours]).split() == [
        *("jax", "gpt", "ours", "1", "1", "5.00", "1.25", "2.50", "3.00", "1.00", "10", "1.00", "01234567")
    ]


def test_an_exchange_is_named_by_the_chosen_path():
    rows = [row_of(way=OURS, replicas=2, instances=2, chosen=chosen) for chosen in ("window", "")]
    assert [gpu.formatted(row, rows).split()[5] for row in rows] == ["window", "auto?"]


def test_differing_bits_of_a_spread_are_reported():
    bits = {(1, "auto"): "aaaa", (2, "host"): "aaaa", (2, "window"): "bbbb"}
    rows = [row_of(way=OURS, replicas=4, instances=n, exchange=word, bits=each) for (n, word), each in bits.items()]
    assert gpu.other_bits(rows[:2]) == []
    assert gpu.other_bits(rows) == ["DIFFERENT BITS: jax gpt R=4: n=1 auto aaaa, n=2 host aaaa, n=2 window bbbb"]
    assert gpu.other_bits([row_of(way=OURS, replicas=1, bits="aaaa"), row_of(way=OURS, replicas=2, bits="bbbb")]) == []
    assert "aaaa bbbb" in gpu.other_bits([row_of(way=OURS, bits="aaaa bbbb")])[0]


@pytest.mark.job
@pytest.mark.timeout(90)
def test_a_failing_process_leaves_its_error_in_the_row(monkeypatch):
    monkeypatch.setitem(os.environ, "JAX_PLATFORMS", "nowhere")
    job = GpuJob(GpuCase("jax", JAX, MLP, PLAIN, is_small=True), Effort(2, 0.1, 60.0, 60.0))
    try:
        job.start()
        row = job.measure()
    finally:
        job.close()
    assert "nowhere" in row["error"]
    assert "in main" in row["log"]
    assert "Error" in gpu.formatted(row, [row])
