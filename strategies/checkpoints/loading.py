"""Checkpoints for programs with their own training loop, and their loading by programs that do not train."""

from __future__ import annotations

import ast
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import strategies.trees as trees
from strategies.checkpoints.checkpoint_folder import Best, CheckpointFolder
from strategies.checkpoints.sealed_folders import TRAINING, fault_of, shown
from strategies.core.journal import Recorded
from strategies.core.metrics import StepNotice
from strategies.core.survival import collectively
from strategies.errors import CheckpointError
from strategies.placeholders import packed
from strategies.strategy import Strategy
from strategies.typing import Tree, Variables
from strategies.values import TrainState


class Loop(Protocol):
    """The loop whose steps are saved: a `Trainer` or an `OwnLoop`.

    The gradients of a Trainer's step carry the notice. `Checkpoints` calls `share_notice` only on an `OwnLoop`, so a
    loop whose steps carry no notice must be an `OwnLoop` or a subclass.

    Attributes:
        seed: Seed of the random numbers; a checkpoint with another seed is refused.
    """

    seed: int

    @property
    def notice(self) -> StepNotice:
        """The notice that the instances share with every step."""

    @property
    def strategy(self) -> Strategy:
        """The strategy whose replicas train."""

    @property
    def is_sharded(self) -> bool:
        """Whether instances hold different parts of the state."""

    def whole(self, state: TrainState) -> TrainState:
        """Return the state with a `PartOfArray` for each array that this instance holds only in part."""


class OwnLoop:
    """A replacement of the `Trainer` in `Checkpoints`, for programs that make their steps themselves.

    Every instance has the whole state, and all have the same. `Checkpoints.after_step` is a collective call here: the
    instances tell each other whether one of them was asked to leave.

    Example::

        loop = strategies.OwnLoop(strategy, seed=0)
        with strategies.Checkpoints("folder", loop, every=100) as checkpoints:
            state = checkpoints.restore(strategies.TrainState(variables, optimizer_state, step=0))
            while state.step < 1000:
                variables, optimizer_state = my_step(state.variables, state.optimizer_state)
                state = strategies.TrainState(variables, optimizer_state, state.step + 1)
                checkpoints.after_step(state)

    Args:
        strategy: Strategy whose replicas train.
        seed: Seed of the program's random numbers.
    """

    is_sharded = False

    def __init__(self, strategy: Strategy, seed: int = 0) -> None:
        self.strategy = strategy
        self.seed = seed
        self.notice = StepNotice()

    def whole(self, state: TrainState) -> TrainState:
        """Return the state itself: every instance has all of it."""
        return state

    def share_notice(self) -> None:
        """Share the notice of any instance with all instances. Collective, and repeated if an instance is lost."""
        replicas = self.strategy.replicas

        def ask() -> np.ndarray:
            return replicas.communicator.all_reduce(given(), "max", name="notice")

        def given() -> np.ndarray:
            return np.array([self.notice.is_given], np.float32)

        def share(found: np.ndarray, root: int) -> np.ndarray:
            return replicas.communicator.broadcast(found.copy(), root, name="notice")

        found = collectively(replicas, ask, share, given, Recorded[np.ndarray]("notice", packed, np.array))
        self.notice.agree(float(found[0]))


# ---- loading

logger = logging.getLogger(__name__)

VARIABLES = ".variables"


def load_variables(
    path: str | Path, like: Variables = None, *, step: int | None = None, best: Best | None = None
) -> Variables:
    """Return the variables of a checkpoint, without a strategy, a trainer or other instances; change nothing.

    A training may go on in the folder meanwhile.

    Example::

        variables = strategies.load_variables("digits.checkpoints", best=strategies.Best("accuracy"))

    Args:
        path: Folder of checkpoints, to read the newest intact one; or one checkpoint (`.../step_00000040`).
        like: Pytree of arrays, or of shapes and dtypes as `jax.eval_shape` returns them. The variables get its
            structure and are compared with it. None for nested dictionaries and lists; an object with attributes
            becomes a dictionary.
        step: Step of the checkpoint to read from a folder.
        best: Choice of the checkpoint to read from a folder: the best intact one.

    Returns:
        A pytree of NumPy arrays.

    Raises:
        CheckpointError: If the checkpoint does not exist, is damaged, or has other variables than `like`.
        ValueError: If both `step` and `best` are given.
    """
    checkpoint = find_checkpoint(path, step=step, best=best)
    found = _named(checkpoint, VARIABLES)
    return _nested(checkpoint, found) if like is None else _structured(checkpoint, found, like)


def find_checkpoint(path: str | Path, *, step: int | None = None, best: Best | None = None) -> Path:
    """Return the path of the checkpoint that `load_variables` reads, for the same arguments.

    Raises:
        CheckpointError: If the checkpoint does not exist, or is damaged.
        ValueError: If both `step` and `best` are given.
    """
    path = Path(path)
    if step is not None and best is not None:
        raise ValueError("step and best both choose the checkpoint; give one of them")
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
    what = "intact checkpoint" if best is None else f"intact checkpoint that was saved with the metric {best.metric!r}"
    raise CheckpointError(f"there is no {what} in {folder.path}; give the folder that Checkpoints was given")


def _checked(checkpoint: Path) -> Path:
    """Return the checkpoint, after checking that it exists and is intact."""
    if not checkpoint.is_dir():
        known = ", ".join(map(str, CheckpointFolder(checkpoint.parent, keep=1).steps()))
        raise CheckpointError(
            f"checkpoint {checkpoint} does not exist; there are checkpoints of steps {known or '(none)'}"
        )
    if fault := fault_of(checkpoint):
        raise CheckpointError(f"checkpoint {checkpoint} is damaged ({fault}); use another one")
    return checkpoint


def load_part(checkpoint: Path, part: str) -> Tree:
    """Return a part of the state in a checkpoint, such as `.variables`, as nested dictionaries and lists.

    Args:
        checkpoint: Path that `find_checkpoint` returned.
        part: Prefix of the names of its arrays.

    Returns:
        NumPy arrays; an empty dictionary if the state lacks the part.
    """
    found = _named(checkpoint, part)
    return _nested(checkpoint, found) if found else {}


def _named(checkpoint: Path, part: str) -> dict[str, np.ndarray]:
    _, arrays = CheckpointFolder(checkpoint.parent, keep=1).read(checkpoint)
    return {
        name.removeprefix(part): np.array(array)  # a copy, so that the other arrays are freed
        for name, array in arrays.items()
        if name.startswith(part)
    }


def _structured(checkpoint: Path, found: Mapping[str, np.ndarray], like: Variables) -> Variables:
    """Return the arrays in the structure of another tree."""
    paths, structure = trees.flatten_with_path(like)
    wanted = {trees.keystr(path): leaf for path, leaf in paths}
    for name in sorted(wanted.keys() | found.keys()):
        there, here = (f"{of[name].dtype}{list(of[name].shape)}" if name in of else "nothing" for of in (found, wanted))
        if there != here:
            raise CheckpointError(
                f"checkpoint {checkpoint} has {there} as variable {shown(name)}, but like has {here}; use the same "
                "model"
            )
    return trees.unflatten(structure, [found[name] for name in wanted])


def _nested(checkpoint: Path, found: Mapping[str, np.ndarray]) -> Variables:
    """Return the arrays in nested dictionaries, with lists for keys 0, 1, 2, ..."""
    root: dict[Any, Any] = {}
    for name, array in found.items():
        inner = root
        *outer, last = _keys(checkpoint, name)
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = array
    return _with_lists(root)[""]


def _keys(checkpoint: Path, name: str) -> list[Any]:
    """Return the keys that lead to an array: for `['a'][0].b` they are ["", "a", 0, "b"]."""
    try:
        node: Any = ast.parse(f"x{name}", mode="eval").body
        keys = []
        while not isinstance(node, ast.Name):
            keys.append(node.attr if isinstance(node, ast.Attribute) else ast.literal_eval(node.slice))
            node = node.value
    except (SyntaxError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"checkpoint {checkpoint} has a variable {shown(name)}, whose name does not give its structure; "
            "give the argument like"
        ) from error
    return ["", *keys[::-1]]


def _with_lists(tree: Tree) -> Any:
    if not isinstance(tree, dict):
        return tree
    values = {key: _with_lists(value) for key, value in tree.items()}
    is_list = all(type(key) is int for key in values) and sorted(values) == list(range(len(values)))
    return [values[key] for key in sorted(values)] if is_list else values
