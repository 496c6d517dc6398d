"""What the packages export is what the documentation lists, and the documentation's programs run."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import PAGES as ALL_PAGES
from pages import page_programs, page_text

from popdist import horovod

ROOT = Path(__file__).parents[1]
LIMIT_S = 200.0

pytestmark = pytest.mark.long


def listed(page):
    """The names that begin a row of a table, in the chapter on public names where there is one."""
    return re.findall(r"^\| `(\w+)", page_text(page).split("## Public names")[-1], flags=re.MULTILINE)


@pytest.mark.parametrize("package", ["collectives", "popdist", "strategies"])
def test_the_tables_list_every_public_name_once(package):
    assert sorted(listed(f"{package}.md")) == sorted(importlib.import_module(package).__all__)


def test_no_page_has_marks_of_a_merge():
    assert not [
        page for page in ALL_PAGES if re.search(r"^(<{7}|={7}|>{7})", page.read_text(encoding="utf-8"), re.MULTILINE)
    ]


def test_the_page_on_horovod_lists_its_interface():
    described = {
        name
        for row in re.findall(r"^\| (`.*?) \|", page_text("horovod.md"), flags=re.MULTILINE)
        for name in re.findall(r"`(\w+)", row)
    }
    operations = {"Adasum", "Average", "Max", "Min", "Product", "Sum"}
    assert described | operations == set(horovod.__all__)


@pytest.mark.parametrize("package", ["collectives", "popdist", "strategies"])
def test_public_names_exist_are_sorted_and_described(package):
    module = importlib.import_module(package)
    assert list(module.__all__) == sorted(module.__all__)
    for name in module.__all__:
        value = getattr(module, name)
        assert not callable(value) or value.__doc__, name


@pytest.mark.parametrize("package", ["collectives", "popdist", "poprun", "strategies"])
def test_packages_are_typed_and_described(package):
    module = importlib.import_module(package)
    assert module.__doc__
    assert (Path(module.__file__).parent / "py.typed").exists()


PAGES = (
    "strategies.md",
    "checkpoints.md",
    "config.md",
    "cross_replica.md",
    "data.md",
    "debugging.md",
    "evaluation.md",
    "feeds.md",
    "gpus.md",
    "low_precision.md",
    "memory.md",
    "metrics.md",
    "model_state.md",
    "optimizers.md",
    "pipelines.md",
    "pipeline_schedules.md",
    "recomputation.md",
    "training.md",
    "popdist.md",
    "tf_config.md",
)
NUMBER = re.compile(r"[\d.]+(?:e[+-]\d+)?")
ONE_AFTER_THE_OTHER = """
import contextlib, io, json, sys
if len(sys.argv) > 2:
    import strategies
    strategies.IPUStrategy(int(sys.argv[2]))  # JAX's devices are fixed when it starts
outputs = []
for program in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(program, "<documentation>", "exec"), {"__name__": "__main__"})
    outputs.append(output.getvalue())
print(json.dumps(outputs))
"""

EACH_ALONE = """
import contextlib, io, json, os, sys
import jax, jax.numpy, numpy, optax  # what takes most of a start: nothing of this project, and no device is there yet
failed = []
for number, program in enumerate(json.loads(sys.argv[1])):
    if child := os.fork():
        if os.waitpid(child, 0)[1]:
            failed.append(number)
        continue
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(program, f"<program {number}>", "exec"), {"__name__": "__main__"})
    print(json.dumps(output.getvalue()))
    break
else:
    sys.exit(f"these failed: {failed}" if failed else 0)
"""


def run_programs(how, programs, folder, *devices):
    """What is printed where programs of the documentation are run in this way."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "POPDIST_", "PJRT_", "XLA_"))}
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", how, json.dumps(programs), *devices],
        env=clean | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},  # the folders that they make stay
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def check_what_it_says(program, output):
    """It prints the numbers that stand behind its calls of print."""
    said = re.findall(r"^print\(.*# (\[.*\])$", program, flags=re.MULTILINE)
    for words in (words for words in said if "..." not in words):
        printed = NUMBER.findall(output.splitlines()[0])
        assert [round(float(x), 3) for x in printed] == [float(x) for x in NUMBER.findall(words)]


@pytest.mark.complete
@pytest.mark.job
@pytest.mark.timeout(LIMIT_S + 20)
def test_the_programs_of_the_documentation_run(tmp_path):
    """In one process, which has devices for the largest of them."""
    programs = [program for page in PAGES for program in page_programs(page)]
    assert all(map(page_programs, PAGES))
    outputs = run_programs(ONE_AFTER_THE_OTHER, programs, tmp_path, "4")
    for program, output in zip(programs, json.loads(outputs), strict=True):
        check_what_it_says(program, output)


@pytest.mark.complete
@pytest.mark.job
@pytest.mark.timeout(LIMIT_S + 20)
def test_each_of_them_runs_alone(tmp_path):
    """In a process of its own, where nothing of the project is imported before it."""
    programs = [program for page in PAGES for program in page_programs(page)]
    outputs = run_programs(EACH_ALONE, programs, tmp_path).splitlines()
    for program, output in zip(programs, map(json.loads, outputs), strict=True):
        check_what_it_says(program, output)
