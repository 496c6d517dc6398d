"""Pages on PyTorch: they mention every public name, and the programs for PyTorch train."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from pages import page_text

import strategies
import strategies.torch

ROOT = Path(__file__).parents[3]
PAGES = ("torch.md", "torch_modules.md", "torch_loops.md", "poptorch.md")
TEXT = "\n".join(map(page_text, PAGES))


def test_public_names_are_sorted_described_and_mentioned():
    exported = strategies.torch.__all__
    assert list(exported) == sorted(exported)
    for name in exported:
        assert getattr(strategies.torch, name).__doc__
        assert re.search(rf"\b{name}\b", TEXT), name


def test_trainer_attributes_on_the_pages_exist():
    mentioned = set(re.findall(r"\btrainer\.([a-z]\w*)", TEXT))
    assert mentioned
    assert all(hasattr(strategies.torch.Trainer, name) for name in mentioned)


@pytest.mark.complete
def test_the_listing_trains_in_a_pipeline(capsys):
    runpy.run_path(str(ROOT / "popdist" / "examples" / "listings" / "poptorch_network.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    losses = [float(re.search(r"loss ([\d.]+)", line)[1]) for line in lines if line.startswith("epoch")]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 1.0
    assert any(line.startswith("device 3 stage 3") for line in lines)


@pytest.mark.complete
def test_digits_are_learnt_in_plain_training(monkeypatch, capsys, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "launch_scripts"))
    program = str(ROOT / "popdist" / "examples" / "torch_digits.py")
    strategy = strategies.IPUStrategy(4)
    monkeypatch.setattr("strategies.PopDistStrategy", lambda: strategy)
    monkeypatch.setattr("popdist.init", lambda replicas: None)
    monkeypatch.setattr("sys.argv", [program, "--epochs", "2", "--checkpoints", str(tmp_path)])
    runpy.run_path(program, run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert float(re.search(r"([\d.]+)% of the test digits", lines[1])[1]) > 90
    monkeypatch.setattr("sys.argv", [program, "--epochs", "2"])
    runpy.run_path(program, run_name="__main__")
    assert capsys.readouterr().out.splitlines()[-1] == lines[-1]


@pytest.mark.complete
def test_digits_are_learnt_by_poptorchs_program(monkeypatch, capsys, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "launch_scripts"))
    program = str(ROOT / "popdist" / "examples" / "poptorch_digits.py")
    strategy = strategies.IPUStrategy(2)
    monkeypatch.setattr("strategies.compat.poptorch.options.PopDistStrategy", lambda: strategy)
    monkeypatch.setattr("popdist.init", lambda: None)
    monkeypatch.setattr("popdist.getInstanceIndex", lambda: 0)
    words = [
        "--epochs",
        "2",
        "--learning-rate",
        "0.002",
        "--profile",
        "--profile-dir",
        str(tmp_path),
        "--offload-optimiser",
    ]
    monkeypatch.setattr("sys.argv", [program, *words])
    runpy.run_path(program, run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert float(re.search(r"([\d.]+)% of the test digits", lines[-1])[1]) > 60
    assert "device 3 stage 3" in (tmp_path / "instance0.txt").read_text()
