"""Warnings about libraries that would train separately in each instance, and the wait of a reserve for its program.

The agent of instance 0, and of a reserve, puts this folder in front of PYTHONPATH, so Python imports this file when it
starts. The file then restores PYTHONPATH, `sys.path` and the `sitecustomize` that Python would have found otherwise. It
runs in every Python of the program, of any version, so it imports nothing until then.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))
_WAY_OUT = "give `poprun --torch-distributed-env yes`"
_DEVICES = "Trainer(devices={local}, num_nodes={nodes})"
_DEEPSPEED = "deepspeed"

_TRAINERS = {
    "lightning.fabric.fabric": "Fabric",
    "lightning.pytorch.trainer.trainer": "Trainer",
    "lightning_fabric.fabric": "Fabric",
    "pytorch_lightning.trainer.trainer": "Trainer",
}
"""The modules of Lightning whose trainers are named when they are made, unless their strategy is one of ours."""
_OURS = "strategies."
_ACCELERATE = "accelerate.state"  # its state also counts the processes of transformers
_GROUPS = "torch.distributed.distributed_c10d"
_HOROVOD = "horovod.torch"


class ImportWatch:
    """A module finder that warns once, and leaves all modules to the other finders."""

    def __init__(self) -> None:
        self._has_said = False

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Watch a library that has to know the other instances.

        Returns:
            The spec by which Python loads the module. None: Python loads it as usual.
        """
        is_watched = name in _TRAINERS or name in (_ACCELERATE, _DEEPSPEED, _GROUPS, _HOROVOD)
        return self._looked_into(name, path) if is_watched else None

    def _looked_into(self, name: str, path: Sequence[str] | None) -> ModuleSpec | None:
        spec = _find(name, path, (each for each in sys.meta_path if each is not self))
        if spec is None or spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return spec
        execute = spec.loader.exec_module

        def execute_and_look(module: ModuleType) -> None:
            execute(module)
            if name == _GROUPS:
                self._look_at_groups(module)
            elif name == _HOROVOD:
                self._look_at_horovod(module)
            elif name == _ACCELERATE:
                self._look_at_state(module)
            elif name == _DEEPSPEED:
                self._look_at_import(name)
            elif hasattr(module, _TRAINERS[name]):
                self._look_at_trainer(getattr(module, _TRAINERS[name]))

        spec.loader.exec_module = execute_and_look  # type: ignore[method-assign]
        return spec

    def _look_at_groups(self, module: ModuleType) -> None:
        from functools import wraps

        init: Callable[..., object] = module.init_process_group

        @wraps(init)
        def init_process_group(*words: object, **options: object) -> object:
            is_told = options.get("rank", -1) != -1 or options.get("init_method") not in (None, "env://")
            if not _knows_others() and not is_told and len(words) < 2:
                self._warn("torch.distributed.init_process_group was called", _ways_out(""))
            return init(*words, **options)

        module.init_process_group = init_process_group  # type: ignore[attr-defined]

    def _look_at_import(self, name: str) -> None:
        if not _knows_others():
            self._warn(f"{name} was imported", _ways_out(""))

    def _look_at_state(self, module: ModuleType) -> None:
        """Warn when accelerate finds no other process; a program may have made a group before."""
        from functools import wraps

        if not hasattr(module, "PartialState"):
            return
        init: Callable[..., None] = module.PartialState.__init__

        @wraps(init)
        def init_and_look(made: object, *words: object, **options: object) -> None:
            knows_others, ways = _knows_others(), _ways_out("")  # accelerate sets the variables, too
            try:
                init(made, *words, **options)
            finally:
                if getattr(made, "num_processes", 1) == 1 and not knows_others:
                    self._warn("accelerate was set up", ways)

        module.PartialState.__init__ = init_and_look

    def _look_at_horovod(self, module: ModuleType) -> None:
        """Warn if Horovod was built without MPI, by which it finds the others."""
        if hasattr(module, "mpi_built") and not module.mpi_built():
            self._warn(f"{_HOROVOD} without MPI was imported", ["build Horovod with HOROVOD_WITH_MPI=1"])

    def _look_at_trainer(self, trainer: type) -> None:
        from functools import wraps

        init: Callable[..., None] = trainer.__init__  # type: ignore[misc]

        @wraps(init)
        def init_and_look(made: object, *words: object, **options: object) -> None:
            init(made, *words, **options)
            strategy = getattr(made, "strategy", None)
            if type(strategy).__module__.startswith(_OURS):
                return
            code = _DEVICES.replace("Trainer", trainer.__name__)
            if getattr(made, "world_size", 0) == 1:
                self._warn(f"a {trainer.__name__} of Lightning has world size 1", _ways_out(code))
            elif not _knows_others():
                self._warn(f"a {trainer.__name__} of Lightning was made", _ways_out(code))

        trainer.__init__ = init_and_look  # type: ignore[misc]

    def _warn(self, fact: str, ways: Sequence[str]) -> None:
        if self._has_said:
            return
        self._has_said = True
        count = os.environ["OMPI_COMM_WORLD_SIZE"]
        sys.stderr.write(
            f"poprun: {fact} in instance 0 of {count}, and it does not know the other instances, so each may "
            f"train a model of its own; {' and '.join(ways)}, or train with a strategy of this project\n"
        )


def _knows_others() -> bool:
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def _ways_out(code: str) -> list[str]:
    """Return how a library gets to know the other instances, and the code that its users have to write."""
    count = int(os.environ["OMPI_COMM_WORLD_SIZE"])
    local = int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", count))
    ways = [] if _knows_others() else [_WAY_OUT]
    return [*ways, f"write {code.format(local=local, nodes=count // local)}"] if code else ways


def _find(name: str, path: Sequence[str] | None, finders: Iterable[object]) -> ModuleSpec | None:
    """Return the spec of the first finder that knows a module, or None."""
    specs = (finder.find_spec(name, path) for finder in finders if hasattr(finder, "find_spec"))
    return next((spec for spec in specs if spec is not None), None)


def _put_back() -> None:
    """Undo the agent's changes, and import the `sitecustomize` that this file hides."""
    sys.path[:] = [each for each in sys.path if os.path.abspath(each or ".") != _HERE]
    rest = os.environ.pop("PYTHONPATH", "").partition(os.pathsep)[2]
    if rest:
        os.environ["PYTHONPATH"] = rest
    hidden = _find("sitecustomize", None, sys.meta_path)
    if hidden is not None and hidden.loader is not None and hasattr(hidden.loader, "exec_module"):
        module = sys.modules["sitecustomize"] = type(sys)("sitecustomize")
        module.__spec__, module.__loader__, module.__file__ = hidden, hidden.loader, hidden.origin
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
    if os.environ.get("OMPI_COMM_WORLD_RANK") == "0":
        sys.meta_path.insert(0, ImportWatch())
    _put_back()
    _hold_reserve()
