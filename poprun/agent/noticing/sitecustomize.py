"""Has Python warn about libraries that would train in each of several instances alone.

The agent of instance 0 puts this folder in front of PYTHONPATH, and Python imports the file when it starts. It puts
everything back: PYTHONPATH, `sys.path`, and the `sitecustomize` that Python would have found without it. It runs in
whatever Python the program has, and in every one, so it loads nothing until such a library is imported.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_WATCHED = frozenset(
    (
        "accelerate",
        "deepspeed",
        "horovod.torch",
        "lightning",
        "lightning.fabric.fabric",
        "lightning.pytorch.trainer.trainer",
        "lightning_fabric",
        "lightning_fabric.fabric",
        "pytorch_lightning",
        "pytorch_lightning.trainer.trainer",
        "torch.distributed.distributed_c10d",
        "transformers.trainer",
    )
)


class Watch:
    """A finder of modules that leaves nearly all of them to the others."""

    def __init__(self) -> None:
        self._notices: Any = None

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> Any:
        """Have the import of a watched library seen."""
        if name not in _WATCHED:
            return None
        if self._notices is None:
            self._notices = _load_notices()
        return self._notices.see_import(name, path, [each for each in sys.meta_path if each is not self])


def _load_notices() -> Any:
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("poprun_notices", os.path.join(_HERE, "notices.py"))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Notices(os.environ, lambda text: sys.stderr.write(text))


def _put_back() -> None:
    """Undo what the agent has done, and import the `sitecustomize` that this one hides."""
    sys.path[:] = [each for each in sys.path if os.path.abspath(each or ".") != _HERE]
    rest = os.environ.pop("PYTHONPATH", "").partition(os.pathsep)[2]
    if rest:
        os.environ["PYTHONPATH"] = rest
    hidden = _find("sitecustomize", None, sys.meta_path)
    if hidden is not None and hasattr(hidden.loader, "exec_module"):
        module = sys.modules["sitecustomize"] = type(sys)("sitecustomize")
        module.__spec__, module.__loader__, module.__file__ = hidden, hidden.loader, hidden.origin
        hidden.loader.exec_module(module)


def _find(name: str, path: Sequence[str] | None, finders: Sequence[Any]) -> Any:
    """Return how the first finder that knows a module would load it; None: nobody does."""
    specs = (finder.find_spec(name, path) for finder in finders if hasattr(finder, "find_spec"))
    return next((spec for spec in specs if spec is not None), None)


if __name__ == "sitecustomize":  # not in a test
    sys.meta_path.insert(0, Watch())
    _put_back()
