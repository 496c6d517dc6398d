"""Where modules of this package are, for programs that import from them what is not public."""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

_HERE = Path(__file__).parent
_RENAMED = {
    "notes": "strategies.checkpoints.plain_values",
    "private_folders": "popdist.records.private_files",
    "probing": "strategies.comparing.exactness",
    "sharding": "strategies.data.layout",
    "streams": "strategies.data.sequential",
    "survival": "strategies.replicas.membership",
    "step.evaluation": "strategies.evaluation.evaluator",
    "step.gradients": "strategies.gradients.gradient_programs",
    "step.trainer": "strategies.trainer",
    "step.updates": "strategies.updates.update",
}
_ROOM_THAT_WAS_FULL = "step"  # its files lie in several rooms now


class _Signpost(MetaPathFinder):
    """Comes last: finds nothing, and says of a module that is in a room now, or has another name, where it is."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package == __package__ and (now := _place_of(name)):
            raise ModuleNotFoundError(
                f"{fullname} is {now} now; import what is public from {package} itself", name=fullname
            )
        return None


def _place_of(name: str) -> str | None:
    """The full name that a module has now, given the one that it had in this package; None if there was none."""
    room, _, file = name.rpartition(".")
    if room not in ("", _ROOM_THAT_WAS_FULL):
        return None
    places = sorted(_HERE.glob(f"*/{file}.py"))
    found = [".".join([__package__, place.parent.name, file]) for place in places]
    return _RENAMED.get(name) or next(iter(found), None)


def put_up_signposts() -> None:
    """Have imports of modules that have moved fail with a line that says where they are."""
    sys.meta_path.append(_Signpost())
