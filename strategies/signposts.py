"""Where modules of this package are, for programs that import from them what is not public."""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

_HERE = Path(__file__).parent
_RENAMED = {
    "notes": "checkpoints/plain_values",
    "sharding": "data/layout",
    "streams": "data/sequential",
    "survival": "replicas/membership",
}


class _Signpost(MetaPathFinder):
    """Comes last: finds nothing, and says of a module that is in a room now, or has another name, where it is."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        if package == __package__:
            places = [_HERE / f"{_RENAMED[name]}.py"] if name in _RENAMED else _HERE.glob(f"*/{name}.py")
            for place in places:
                now = ".".join([package, *place.relative_to(_HERE).with_suffix("").parts])
                raise ModuleNotFoundError(
                    f"{fullname} is {now} now; import what is public from {package} itself", name=fullname
                )
        return None


def put_up_signposts() -> None:
    """Have imports of modules that have moved fail with a line that says where they are."""
    sys.meta_path.append(_Signpost())
