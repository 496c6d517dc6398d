"""Trained variables out of a checkpoint, for programs that do not train."""

from __future__ import annotations

import ast
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from strategies.checkpoints.checkpoint_folder import Best, CheckpointFolder
from strategies.checkpoints.sealed_folders import TRAINING, fault_of, shown
from strategies.errors import CheckpointError
from strategies.typing import Tree, Variables

logger = logging.getLogger(__name__)

VARIABLES = ".variables"


def load_variables(
    path: str | Path, like: Variables = None, *, step: int | None = None, best: Best | None = None
) -> Variables:
    """The variables of a checkpoint; needs no strategy, no Trainer, and no other instance, and changes nothing.

    A training may go on in the folder meanwhile.

    Args:
        path: a folder of checkpoints, of which the newest whole one is read, or one checkpoint (`.../step_00000040`).
        like: a pytree of arrays, or of shapes and dtypes as `jax.eval_shape` returns them, in whose structure the
            variables are wanted; they are compared with it. None for nested dictionaries and lists: what has attributes
            comes as a dictionary of them.
        step: of a folder, the checkpoint of this step.
        best: of a folder, the best checkpoint that is whole.

    Returns:
        NumPy arrays in a pytree.

    Raises:
        CheckpointError: if there is no such checkpoint, it is damaged, or has other variables than `like`.
        ValueError: if both `step` and `best` are given.
    """
    checkpoint = find_checkpoint(path, step=step, best=best)
    found = _named(checkpoint, VARIABLES)
    return _nested(checkpoint, found) if like is None else _structured(checkpoint, found, like)


def find_checkpoint(path: str | Path, *, step: int | None = None, best: Best | None = None) -> Path:
    """The checkpoint that `load_variables` reads; see there.

    Raises:
        CheckpointError: if there is no such checkpoint, or it is damaged.
        ValueError: if both `step` and `best` are given.
    """
    path = Path(path)
    if step is not None and best is not None:
        raise ValueError("step and best both say which checkpoint to read; give one of them")
    if (path / TRAINING).exists():
        return _checked(path)
    folder = CheckpointFolder(path, keep=1)
    if step is not None:
        return _checked(folder.of_step(step))
    candidates = folder.steps()[::-1] if best is None else best.steps(folder.metrics())
    for candidate in candidates:
        checkpoint = folder.of_step(candidate)
        fault = fault_of(checkpoint)
        if not fault:
            return checkpoint
        logger.warning("checkpoint %s is damaged (%s)", checkpoint, fault)
    what = "whole checkpoint" if best is None else f"whole checkpoint that was saved with the metric {best.metric!r}"
    raise CheckpointError(f"there is no {what} in {folder.path}; name the folder that Checkpoints was given")


def _checked(checkpoint: Path) -> Path:
    """The checkpoint, if it is there and whole."""
    if not checkpoint.is_dir():
        known = ", ".join(map(str, CheckpointFolder(checkpoint.parent, keep=1).steps()))
        raise CheckpointError(f"there is no checkpoint {checkpoint}; there are those of the steps {known or '(none)'}")
    if fault := fault_of(checkpoint):
        raise CheckpointError(f"checkpoint {checkpoint} is damaged ({fault}); use another one")
    return checkpoint


def load_part(checkpoint: Path, part: str) -> Tree:
    """A part of the state in a checkpoint, such as `.variables`, in nested dictionaries and lists.

    Args:
        checkpoint: what `find_checkpoint` has returned.
        part: what the names of its arrays begin with.

    Returns:
        NumPy arrays; an empty dictionary where there are none.
    """
    found = _named(checkpoint, part)
    return _nested(checkpoint, found) if found else {}


def _named(checkpoint: Path, part: str) -> dict[str, np.ndarray]:
    _, arrays = CheckpointFolder(checkpoint.parent, keep=1).read(checkpoint)
    return {
        name.removeprefix(part): np.array(array)  # a copy, which does not keep the rest in memory
        for name, array in arrays.items()
        if name.startswith(part)
    }


def _structured(checkpoint: Path, found: Mapping[str, np.ndarray], like: Variables) -> Variables:
    """The arrays in the structure of another tree."""
    paths, structure = jax.tree_util.tree_flatten_with_path(like)
    wanted = {jax.tree_util.keystr(path): leaf for path, leaf in paths}
    for name in sorted(wanted.keys() | found.keys()):
        there, here = (f"{of[name].dtype}{list(of[name].shape)}" if name in of else "nothing" for of in (found, wanted))
        if there != here:
            raise CheckpointError(
                f"checkpoint {checkpoint} has {there} as variable {shown(name)}, and like has {here}; use the same "
                "model"
            )
    return jax.tree.unflatten(structure, [found[name] for name in wanted])


def _nested(checkpoint: Path, found: Mapping[str, np.ndarray]) -> Variables:
    """The arrays in dictionaries, and in lists where their keys are 0, 1, 2, ..."""
    root: dict[Any, Any] = {}
    for name, array in found.items():
        inner = root
        *outer, last = _keys(checkpoint, name)
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = array
    return _with_lists(root)[""]


def _keys(checkpoint: Path, name: str) -> list[Any]:
    """Return the keys that lead to an array: of `['a'][0].b` ["", "a", 0, "b"]."""
    try:
        node: Any = ast.parse(f"x{name}", mode="eval").body
        keys = []
        while not isinstance(node, ast.Name):
            keys.append(node.attr if isinstance(node, ast.Attribute) else ast.literal_eval(node.slice))
            node = node.value
    except (SyntaxError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"checkpoint {checkpoint} has a variable {shown(name)}, from whose name no structure follows; give like"
        ) from error
    return ["", *keys[::-1]]


def _with_lists(tree: Tree) -> Any:
    if not isinstance(tree, dict):
        return tree
    values = {key: _with_lists(value) for key, value in tree.items()}
    is_list = all(type(key) is int for key in values) and sorted(values) == list(range(len(values)))
    return [values[key] for key in sorted(values)] if is_list else values
