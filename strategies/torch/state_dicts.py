"""State dictionaries of a module and its optimizer for plain PyTorch, read from checkpoints, or saved to a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import strategies.trees as trees
from strategies.checkpoints.checkpoint_folder import Best
from strategies.checkpoints.loading import find_checkpoint, load_part
from strategies.torch.optimizer_arrays import GROUPS, PARAMS, STATE, plain_number
from strategies.torch.replicas.buffers import OF_EACH
from strategies.torch.tensors import as_tensor
from strategies.torch.training import IS_MADE
from strategies.typing import Tree


@dataclass(frozen=True)
class StateDicts:
    """A training in the form of plain PyTorch.

    Attributes:
        module: The argument for `module.load_state_dict`.
        optimizer: The argument for `optimizer.load_state_dict`, of an optimizer of the same kind.
    """

    module: dict[str, torch.Tensor]
    optimizer: dict[str, object]

    def save(self, file: str | Path) -> None:
        """Write both with `torch.save`, as `{"module": ..., "optimizer": ...}`."""
        torch.save({"module": self.module, "optimizer": self.optimizer}, file)


def load_state_dicts(path: str | Path, *, step: int | None = None, best: Best | None = None) -> StateDicts:
    """Load the state dictionaries from a checkpoint. No strategy, module or other instance is needed.

        found = strategies.torch.load_state_dicts("checkpoints")
        module.load_state_dict(found.module)

    Args:
        path: A folder of checkpoints, from which the newest whole one is read, or a single checkpoint.
        step: Read the folder's checkpoint of this step.
        best: Read the folder's best whole checkpoint.

    Raises:
        CheckpointError: If there is no such checkpoint, or it is damaged.
        ValueError: If both `step` and `best` are given.
    """
    checkpoint = find_checkpoint(path, step=step, best=best)
    arrays = load_part(checkpoint, ".variables") | load_part(checkpoint, ".model_state")
    module = {name: as_tensor(array) for name, array in arrays.items() if not name.endswith(OF_EACH)}
    return StateDicts(module, _optimizer(load_part(checkpoint, ".optimizer_state")))


def _optimizer(tree: Tree) -> dict[str, object]:
    """Return the optimizer's part of a tree in the form of `optimizer.state_dict`."""
    is_made = np.asarray(tree[IS_MADE])
    of_parameters = tree.get(STATE, {})
    numbered = enumerate(of_parameters) if isinstance(of_parameters, list) else of_parameters.items()
    state = {number: trees.map(as_tensor, values) for number, values in numbered if is_made[number]}
    return {STATE: state, GROUPS: [_group(group) for group in tree[GROUPS]]}


def _group(numbers: Tree) -> dict[str, object]:
    plain = {name: plain_number(value) for name, value in numbers.items() if name != PARAMS}
    return {**plain, PARAMS: np.asarray(numbers[PARAMS]).tolist()}
