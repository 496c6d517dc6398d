"""The file that holds a reserve before its program begins, in the other programs that Python runs there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from poprun.agent.guard import HOLDING


def printed(folder: Path, program: str, path: str) -> str:
    """Run a Python program in the environment of a reserve, but not as a reserve; return its output."""
    clean = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    words = [sys.executable, "-c", program]
    environ = clean | {"PYTHONPATH": path}
    return subprocess.run(words, env=environ, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def test_a_program_sees_the_python_path_and_the_sitecustomize_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.is_mine = __file__\n")
    program = "import os, sys, sitecustomize\nprint(os.environ.get('PYTHONPATH'), sys.path[1], sys.is_mine)"
    path = os.pathsep.join((HOLDING, str(tmp_path)))
    assert printed(tmp_path, program, path) == f"{tmp_path} {tmp_path} {tmp_path}/sitecustomize.py"


def test_a_program_without_a_python_path_has_none(tmp_path: Path) -> None:
    assert printed(tmp_path, "import os; print(os.environ.get('PYTHONPATH'))", HOLDING) == "None"
