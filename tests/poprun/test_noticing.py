"""The warning about libraries that would train in each instance alone, shown once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from poprun.agent.guard import NOTICING

TWO = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
MET = {"RANK": "0", "WORLD_SIZE": "2"}
STATE = "class PartialState:\n    def __init__(self, num_processes): self.num_processes = num_processes\n"
TRAINERS = ["lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer"]
TRAINER = """
class Trainer:
    def __init__(self, world_size, strategy=None):
        self.world_size, self.strategy = world_size, strategy
"""
GROUPS = "def init_process_group(backend=None, init_method=None, rank=-1): pass\n"


@pytest.fixture
def library(tmp_path: Path):
    """Return a function that writes a module and the packages around it."""

    def write(name: str, text: str = "") -> None:
        *packages, last = name.split(".")
        folder = tmp_path
        for package in packages:
            folder = folder / package
            folder.mkdir(exist_ok=True)
            (folder / "__init__.py").touch()
        (folder / f"{last}.py").write_text(text)

    return write


def run(folder: Path, program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program as the agent of instance 0 does."""
    clean = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    paths = {"PYTHONPATH": os.pathsep.join((NOTICING, str(folder)))}
    words = [sys.executable, "-c", program]
    return subprocess.run(words, env=clean | TWO | paths | variables, capture_output=True, text=True, check=True)


def test_a_library_that_ignores_the_other_instances_is_named_once(tmp_path: Path, library) -> None:
    library("deepspeed")
    library("accelerate.state", STATE)
    said = run(tmp_path, "import deepspeed, accelerate.state\naccelerate.state.PartialState(1)").stderr
    assert said.startswith(
        "poprun: deepspeed was imported in instance 0 of 2, and it does not know the other instances"
    )
    assert said.count("\n") == 1
    assert "give `poprun --torch-distributed-env yes`" in said


def test_a_library_that_was_told_of_the_others_is_not_named(tmp_path: Path, library) -> None:
    library("deepspeed")
    assert run(tmp_path, "import deepspeed", **MET).stderr == ""


def test_a_library_whose_presence_is_asked_for_is_not_named(tmp_path: Path, library) -> None:
    """accelerate looks for DeepSpeed so."""
    library("deepspeed")
    assert run(tmp_path, "from importlib.util import find_spec\nassert find_spec('deepspeed')").stderr == ""


@pytest.mark.parametrize(("num_processes", "variables", "lines"), [(1, {}, 1), (2, {}, 0), (1, MET, 0)])
def test_accelerate_is_named_if_it_finds_no_other_process(
    tmp_path: Path, library, num_processes: int, variables: dict[str, str], lines: int
) -> None:
    """A program that has met the others by itself, for example at popdist://, gets no warning."""
    library("accelerate.state", STATE)
    program = "from accelerate.state import PartialState\n" + f"PartialState({num_processes})\n" * 2
    said = run(tmp_path, program, **variables).stderr
    assert said.count("accelerate was set up in instance 0 of 2, and it does not know") == lines
    assert said.count("give `poprun --torch-distributed-env yes`") == said.count("\n") == lines


@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize(
    ("world_size", "variables", "fact"),
    [(1, MET, "has world size 1"), (1, {}, "has world size 1"), (2, {}, "was made"), (2, MET, None)],
)
def test_a_lightning_trainer_that_ignores_the_other_instances_is_named_once(
    tmp_path: Path, library, name: str, world_size: int, variables: dict[str, str], fact: str | None
) -> None:
    library(name, TRAINER)
    said = run(tmp_path, f"from {name} import Trainer\n" + f"Trainer({world_size})\n" * 2, **variables).stderr
    assert said.count("\n") == (fact is not None)
    if fact is not None:
        assert said.startswith(f"poprun: a Trainer of Lightning {fact} in instance 0 of 2, and it does not know")
        assert "write Trainer(devices=2, num_nodes=1)" in said
        assert ("--torch-distributed-env" in said) == (not variables)


def test_a_lightning_trainer_with_a_strategy_of_this_project_is_not_named(tmp_path: Path, library) -> None:
    library(TRAINERS[1], TRAINER)
    made = "type('Strategy', (), {'__module__': 'strategies.mine'})()"
    program = f"from {TRAINERS[1]} import Trainer\nTrainer(2, {made})"
    assert run(tmp_path, program).stderr == ""


@pytest.mark.parametrize(("call", "lines"), [("'gloo'", 1), ("'gloo', 'file:///x', rank=0", 0), ("rank=1", 0)])
def test_a_process_group_without_variables_is_named(tmp_path: Path, library, call: str, lines: int) -> None:
    library("torch.distributed.distributed_c10d", GROUPS)
    said = run(tmp_path, f"from torch.distributed.distributed_c10d import *\ninit_process_group({call})").stderr
    assert said.count("torch.distributed.init_process_group was called") == said.count("\n") == lines


@pytest.mark.parametrize(
    ("text", "lines"), [("def mpi_built(): return True", 0), ("def mpi_built(): return False", 1), ("", 0)]
)
def test_horovod_is_named_only_if_it_was_built_without_mpi(tmp_path: Path, library, text: str, lines: int) -> None:
    library("horovod.torch", text)
    said = run(tmp_path, "import horovod.torch").stderr
    assert said.count("horovod.torch without MPI was imported") == said.count("\n") == lines


def test_the_program_sees_the_same_python_path_as_without_the_warning(tmp_path: Path, library) -> None:
    """PYTHONPATH, the module path, and the user's own `sitecustomize` are unchanged."""
    library("sitecustomize", "import sys\nsys.is_mine = __file__\n")
    program = "import os, sys, sitecustomize\nprint(os.environ.get('PYTHONPATH'), sys.path[1], sys.is_mine)"
    expected = f"{tmp_path} {tmp_path} {tmp_path}/sitecustomize.py"
    assert run(tmp_path, program).stdout.strip() == expected
    alone = run(tmp_path, "import os; print(os.environ.get('PYTHONPATH'))", PYTHONPATH=NOTICING)
    assert alone.stdout == "None\n"
