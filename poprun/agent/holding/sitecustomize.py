"""The wait of a reserve, which is connected with the other processes before its program begins.

The agent of a reserve puts this folder in front of PYTHONPATH, so Python imports this file when it starts. The file
then restores PYTHONPATH, `sys.path` and the `sitecustomize` that Python would have found otherwise. It runs in every
Python of the program, of any version.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

_HERE = os.path.dirname(os.path.abspath(__file__))


def _put_back() -> None:
    """Undo the agent's changes, and import the `sitecustomize` that this file hides."""
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder or ".") != _HERE]
    rest = os.environ.pop("PYTHONPATH", "").partition(os.pathsep)[2]
    if rest:
        os.environ["PYTHONPATH"] = rest
    hidden = PathFinder.find_spec("sitecustomize")
    if hidden is not None and hidden.loader is not None:
        module = sys.modules["sitecustomize"] = module_from_spec(hidden)
        hidden.loader.exec_module(module)


def _hold_reserve() -> None:
    """Let a reserve wait, connected with the other processes, until poprun starts its program.

    A child of the program does not wait here, and a program that another command starts waits in `popdist.init`.
    """
    if os.environ.get("POPDIST_RESERVE") == str(os.getppid()):
        try:
            import popdist
        except ImportError:
            return
        popdist.init()


if __name__ == "sitecustomize":  # false in tests
    _put_back()
    _hold_reserve()
