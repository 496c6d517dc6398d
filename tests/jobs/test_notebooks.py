"""Launches from a real notebook: the programs of from_python.md, and interrupts of the kernel."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from pages import page_programs
from poprun_jobs import LIMIT_S, ROOT, ROOT_ALLOWED, run_alone

NOTEBOOK = ROOT / "launch_scripts" / "launch.ipynb"
PROGRAMS = page_programs("from_python.md")
MISSING = "is not installed; pip install ipykernel nbclient"

pytestmark = pytest.mark.job


def test_the_notebook_has_the_programs_of_its_page():
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    assert ["".join(cell["source"]) + "\n" for cell in cells if cell["cell_type"] == "code"] == PROGRAMS
    assert not any(cell.get("outputs") for cell in cells)


def check_outputs(*outputs: str) -> None:
    """Check what the cells of the page print."""
    assert len(outputs) == len(PROGRAMS)
    assert "[1,0]<stdout>:epoch 5: loss " in outputs[1]
    assert outputs[1].splitlines()[-1].startswith("[ ")
    assert outputs[2].splitlines()[-1] == "True"
    assert outputs[3].splitlines()[-1] == "raised by instance 1"


@pytest.mark.complete
@pytest.mark.cores(2)
def test_the_programs_of_the_page_run_as_a_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("\nprint('--')\n".join(PROGRAMS))
    check_outputs(*run_alone(sys.executable, str(script)).stdout.split("--\n"))


@pytest.mark.complete
@pytest.mark.cores(2)
@pytest.mark.filterwarnings("ignore")
def test_the_notebook_runs_in_a_kernel():
    pytest.importorskip("ipykernel", reason=f"ipykernel {MISSING}")
    nbclient = pytest.importorskip("nbclient", reason=f"nbclient {MISSING}")
    import nbformat

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=LIMIT_S).execute(env=environ())
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    check_outputs(*("".join(each.get("text", "") for each in cell.outputs) for cell in cells))


WAITING = """
import sys, time
import popdist

def wait():
    popdist.init()
    popdist.synchronize()
    print("begun", flush=True)
    time.sleep(1000)

popdist.launch(wait, num_instances=2)
"""


def environ() -> dict[str, str]:
    """Return the environment of a user's kernel."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "POPDIST_", "PJRT_"))}
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return clean | ROOT_ALLOWED | {"PYTHONPATH": paths}


class Kernel:
    """A kernel, and what its cells show."""

    def __init__(self) -> None:
        from jupyter_client.manager import start_new_kernel

        self.manager, self._client = start_new_kernel(env=environ())

    def run(self, code: str) -> None:
        self._client.execute(code, stop_on_error=False)

    def shows(self, text: str) -> str:
        """Wait until cells have shown this text, and return all that they have shown since the last call."""
        shown, until_s = "", time.monotonic() + LIMIT_S
        while text not in shown:
            content: dict[str, Any] = self._client.get_iopub_msg(timeout=until_s - time.monotonic())["content"]
            shown += content.get("text", "") + content.get("ename", "") + content.get("evalue", "")
        return shown

    def close(self) -> None:
        self._client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    pytest.importorskip("ipykernel", reason=f"ipykernel {MISSING}")
    opened = Kernel()
    yield opened
    opened.close()


@pytest.mark.complete
@pytest.mark.cores(2)
@pytest.mark.filterwarnings("ignore")
def test_an_interrupt_of_the_kernel_ends_the_job_and_the_kernel_goes_on(kernel):
    kernel.run(WAITING)
    kernel.shows("<stdout>:begun")
    kernel.manager.interrupt_kernel()
    assert "poprun received SIGINT and ended all instances" in kernel.shows("the job of wait was ended")
    kernel.run("print(popdist.launch(len, 'abc'))")
    kernel.shows("[3]")


@pytest.mark.complete
@pytest.mark.cores(2)
@pytest.mark.filterwarnings("ignore")
def test_nothing_is_left_of_the_job_of_a_kernel_that_is_killed(kernel):
    """The fixture `nothing_is_left` looks for processes."""
    kernel.run(WAITING)
    kernel.shows("<stdout>:begun")
