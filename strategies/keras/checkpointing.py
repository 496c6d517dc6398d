"""Checkpoints of a strategy's own under `fit`: after any step, and resumed on any number of instances."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import jax
import keras

import strategies.checkpoints.checkpoints as saved
from strategies.data.datasets import DistributedDataset
from strategies.keras.protocols import Callbacks
from strategies.train_state import TrainState
from strategies.trainer import Trainer
from strategies.typing import Batch


class FitCheckpoints(keras.callbacks.Callback):
    """A callback that has `fit` saved by `strategies.Checkpoints`, and go on from the newest one where it was.

    Its public name is `strategies.keras.Checkpoints`.

        model.fit(x, y, epochs=10, callbacks=[strategies.keras.Checkpoints("digits.checkpoints", every=100)])

    All variables, those of the optimizer, of metrics and of seed generators, and the position in the data are saved.
    Steps of the epoch that were made before are not made again; callbacks are told of them all the same. The last step
    is saved too. SIGTERM and SIGUSR1 have all instances save after the same step, and leave.

    Args:
        directory: of instance 0; one for each training.
        every: so many steps.
        keep: how many checkpoints are kept, the newest.
        grace_s: how long poprun waits, after SIGTERM, for the last checkpoint.
        seed: of the order in which `fit` shuffles, which otherwise is NumPy's and another one when it goes on.
    """

    def __init__(
        self, directory: str | Path, *, every: int = 1, keep: int = 3, grace_s: float = 30.0, seed: int = 0
    ) -> None:
        super().__init__()
        self.seed = seed
        self._open: Callable[..., saved.Checkpoints] = lambda trainer, dataset: saved.Checkpoints(
            directory, trainer, dataset, every=every, keep=keep, grace_s=grace_s
        )

    def open(self, trainer: Trainer, dataset: DistributedDataset) -> saved.Checkpoints:
        """Open the checkpoints of a training."""
        return self._open(trainer, dataset)


def given_in(callbacks: Callbacks) -> FitCheckpoints | None:
    """Return the one among the callbacks of the user's; None where there is none.

    Raises:
        ValueError: if there are several.
    """
    listed = getattr(callbacks, "callbacks", callbacks)
    listed = listed if isinstance(listed, Sequence) else [listed]
    found = [one for one in listed if isinstance(one, FitCheckpoints)]
    if len(found) > 1:
        raise ValueError(f"there are {len(found)} callbacks strategies.keras.Checkpoints; give fit one of them")
    return found[0] if found else None


class SavedFit:
    """The checkpoints of a `fit` that runs, with the position of its data set.

    Attributes:
        first_epoch: with which it begins.
        skipped: how many steps of that were made before.
    """

    def __init__(self, opened: saved.Checkpoints, dataset: DistributedDataset) -> None:
        self.skipped = 0
        self.first_epoch = 0
        self._opened = opened
        self._dataset = dataset
        self._last: TrainState | None = None

    def __enter__(self) -> SavedFit:
        """See `strategies.Checkpoints`."""
        self._opened.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Save the last step, but not after an error."""
        if error is None and self._last is not None:
            self._opened.save(self._last)
        self._opened.__exit__(kind, error, trace)

    def restored(self, state: TrainState) -> TrainState:
        """Return the state of the newest checkpoint; `state` where there is none. A collective call."""
        found = self._opened.restore(state)
        position = self._dataset.position()
        self.first_epoch, self.skipped = position.epoch, position.step
        return found

    @property
    def _is_at_end(self) -> bool:
        """Whether the last execution of an epoch, which may be shorter, is the one that was made before."""
        try:
            return not self.skipped and self._dataset.position().step == len(self._dataset)
        except TypeError:  # a stream: nobody knows
            return False

    def skip(self, steps: int) -> int:
        """Return how many of the next steps were made before; all of them behind the last one of an epoch."""
        skipped = min(self.skipped, steps)
        self.skipped -= skipped
        return steps if skipped and self._is_at_end else skipped

    def after_step(self, state: TrainState) -> None:
        """Save where it is time; raises `SystemExit` where the job was told to end."""
        self._last = state
        self._opened.after_step(state)


def shape_of_step(example: Batch, rows: int) -> Batch:
    """Return the shapes and dtypes of a step's batch of so many rows, like a batch of any size."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype), example)
