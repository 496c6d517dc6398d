"""Warnings about libraries that would train in each of several instances alone; see `sitecustomize.py`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_WAY_OUT = "give `poprun --torch-distributed-env yes`"
_DEVICES = "Trainer(devices={local}, num_nodes={nodes})"

_IMPORTED = {
    "accelerate": "",
    "deepspeed": "",
    "horovod.torch": "",
    "lightning": _DEVICES,
    "lightning_fabric": _DEVICES.replace("Trainer", "Fabric"),
    "pytorch_lightning": _DEVICES,
    "transformers.trainer": "",
}
"""Libraries that train, and what their users have to write besides."""

_TRAINERS = {
    "lightning.fabric.fabric": "Fabric",
    "lightning.pytorch.trainer.trainer": "Trainer",
    "lightning_fabric.fabric": "Fabric",
    "pytorch_lightning.trainer.trainer": "Trainer",
}
_GROUPS = "torch.distributed.distributed_c10d"


class Notices:
    """What is known of the libraries that a program imports; warns once.

    Args:
        environ: the variables of the program.
        say: takes the warning.
    """

    def __init__(self, environ: Mapping[str, str], say: Callable[[str], object]) -> None:
        self._environ = environ
        self._say = say
        self._has_said = False

    def see_import(self, name: str, path: Sequence[str] | None, finders: Sequence[Any]) -> Any:
        """Warn about a library that cannot know the other instances; look into one that can.

        Returns:
            How Python is to load the module; None: as it would.
        """
        if name in _IMPORTED and not self._knows_others and not _is_own_horovod(name, path):
            self._warn(f"{name} was imported", _IMPORTED[name])
        return self._looked_into(name, path, finders) if name in _TRAINERS or name == _GROUPS else None

    @property
    def _knows_others(self) -> bool:
        return "WORLD_SIZE" in self._environ and "RANK" in self._environ

    def _looked_into(self, name: str, path: Sequence[str] | None, finders: Sequence[Any]) -> Any:
        specs = (finder.find_spec(name, path) for finder in finders if hasattr(finder, "find_spec"))
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or not hasattr(spec.loader, "exec_module"):
            return spec
        execute = spec.loader.exec_module

        def execute_and_look(module: Any) -> None:
            execute(module)
            if name == _GROUPS:
                self._look_at_groups(module)
            else:
                self._look_at_trainer(getattr(module, _TRAINERS[name], None))

        spec.loader.exec_module = execute_and_look
        return spec

    def _look_at_groups(self, module: Any) -> None:
        init = module.init_process_group

        @functools.wraps(init)
        def init_process_group(*words: Any, **options: Any) -> Any:
            is_told = options.get("rank", -1) != -1 or options.get("init_method") not in (None, "env://")
            if not self._knows_others and not is_told and len(words) < 2:
                self._warn("torch.distributed.init_process_group was called", "")
            return init(*words, **options)

        module.init_process_group = init_process_group

    def _look_at_trainer(self, trainer: Any) -> None:
        if trainer is None:
            return
        init = trainer.__init__

        @functools.wraps(init)
        def init_and_look(made: Any, *words: Any, **options: Any) -> None:
            init(made, *words, **options)
            if getattr(made, "world_size", 0) == 1:
                self._warn(f"a {trainer.__name__} of Lightning has world size 1", _IMPORTED["lightning"])

        trainer.__init__ = init_and_look

    def _warn(self, fact: str, besides: str) -> None:
        if self._has_said:
            return
        self._has_said = True
        count = int(self._environ["OMPI_COMM_WORLD_SIZE"])
        local = int(self._environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", count))
        ways = [] if self._knows_others else [_WAY_OUT]
        ways += [f"write {besides.format(local=local, nodes=count // local)}"] if besides else []
        self._say(
            f"poprun: {fact} in instance 0 of {count}, and does not know of the other instances by itself, so each may "
            f"train a model of its own; {' and '.join(ways)}, or train with a strategy of this project\n"
        )


def _is_own_horovod(name: str, path: Sequence[str] | None) -> bool:
    """Whether this is a package of ours under the name of Horovod; Horovod itself has a `runner`."""
    return name == "horovod.torch" and not any(os.path.isdir(os.path.join(each, "runner")) for each in path or ())
