"""The tutorial's program, compared with tutorial.md and run."""

import ast
import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jobs import poprun_jobs
from pages import page_programs, page_text

import strategies
from popdist.examples.digits_data import load_digits

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "popdist" / "examples" / "tutorial.py"
LIMIT_S = 200.0
PATIENCE = 3

pytestmark = [pytest.mark.job, pytest.mark.timeout(2 * LIMIT_S + 20)]


def lines_of(code):
    return [line for line in code.splitlines() if line.strip()]


def test_the_page_shows_the_whole_program_in_order():
    shown = "\n".join(page_programs("tutorial.md"))
    code = PROGRAM.read_text(encoding="utf-8")
    docstring = ast.parse(code).body[0].end_lineno
    assert lines_of(shown) == lines_of("\n".join(code.splitlines()[docstring:]))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the output of one process, and the file that it writes."""
    folder = tmp_path_factory.mktemp("alone")
    done = poprun_jobs.run_alone(sys.executable, str(PROGRAM), limit_s=LIMIT_S, cwd=folder)
    return done.stdout.splitlines(), folder / "best.npz"


def validated(lines):
    """Return the validation loss of each epoch."""
    return [float(re.search(r"validated (\d\.\d+)", line)[1]) for line in lines[:-1]]


@pytest.mark.complete
def test_training_stops_without_progress_and_keeps_the_best_variables(alone):
    lines, file = alone
    losses = validated(lines)
    best = int(np.argmin(losses))
    assert len(losses) == best + PATIENCE + 1 < 100
    assert lines[-1].startswith(f"epoch {best} was best: ")
    assert float(re.search(r"(\d+\.\d)% of other digits", lines[-1])[1]) > 95
    with np.load(file) as kept:
        variables = [kept[name] for name in sorted(kept)]
    assert lines[-1].endswith(strategies.fingerprint(variables))


@pytest.mark.complete
def test_validation_counts_each_row_once(alone):
    """A network written with NumPy computes the same mean for the best epoch."""
    lines, file = alone
    with np.load(file) as kept:
        best = dict(kept)
    digits = load_digits("digits")
    images = digits.train_images[1200:].reshape(-1, 64)
    hidden = np.maximum(images @ best["hidden/kernel"] + best["hidden/bias"], 0)
    logits = hidden @ best["logits/kernel"] + best["logits/bias"]
    labels = digits.train_labels[1200:]
    losses = np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(labels)), labels]
    assert min(validated(lines)) == pytest.approx(float(losses.mean()), abs=1e-4)


@pytest.mark.complete
def test_another_program_predicts_with_the_file(alone, monkeypatch, capsys):
    _, file = alone
    page = page_text("tutorial.md")
    [code] = re.findall(r"^```\n(with np.load.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    tree = ast.parse(PROGRAM.read_text(encoding="utf-8"))
    [apply] = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "apply"]
    digits = load_digits("digits")
    names = {"np": np, "jax": jax, "images": digits.test_images[:20]}
    monkeypatch.chdir(file.parent)
    exec(compile(f"{ast.unparse(apply)}\n{code}", "tutorial.md", "exec"), names)
    predicted = np.array(re.findall(r"\d", capsys.readouterr().out), int)
    assert (predicted == digits.test_labels[:20]).mean() > 0.8


@pytest.mark.complete
@pytest.mark.cores(2)
def test_two_instances_stop_at_the_same_step_with_the_same_bits(alone, tmp_path):
    lines, file = alone
    words = ("--num-instances=2", "--num-replicas=4", sys.executable, str(PROGRAM))
    job = poprun_jobs.start(*words, cwd=tmp_path).finish(LIMIT_S)
    assert job.status == 0, job.stderr
    assert job.lines_of(0) == lines
    assert job.lines_of(1) == []
    assert (tmp_path / "best.npz").stat().st_size == file.stat().st_size


@pytest.mark.complete
@pytest.mark.cores(2)
def test_training_continues_after_an_instance_is_lost_in_a_step(alone, tmp_path):
    lines, _ = alone
    shrinking = ("--on-failure=shrink", "--inject=kill:instance=1,step=30")
    words = ("--num-instances=2", "--num-replicas=4", *shrinking, sys.executable, str(PROGRAM))
    job = poprun_jobs.start(*words, cwd=tmp_path).finish(LIMIT_S)
    assert job.status == 0, job.stderr
    assert "the job completed without 1 instance" in job.stderr
    assert job.lines_of(0) == lines
