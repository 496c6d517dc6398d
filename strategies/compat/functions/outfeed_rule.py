"""The rule that selects a pipeline's outputs for its outfeed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from strategies.argument_checks import wrong_type
from strategies.jax.feeds.outfeed import OutfeedMode, OutfeedQueue
from strategies.jax.gradients.accumulation import asks_for_each
from strategies.typing import AccumulationDtype, Tree


@dataclass(frozen=True)
class OutfeedRule:
    """The rule that selects the last stage's outputs for the outfeed.

    Attributes:
        queue: Outfeed, or None.
        loss: Whether the outfeed gets the loss and nothing else.
        mask: For each output, whether to leave it out; None leaves none out.
        accumulates: Whether the outfeed gets the sum over all micro-batches of an update.
        dtype: Dtype of that sum: None for the output's, a dtype, or a function of the output that returns one.
    """

    queue: OutfeedQueue | None = None
    loss: bool = False
    mask: Sequence[bool] | None = None
    accumulates: bool = False
    dtype: AccumulationDtype = None

    def check(self, learns: bool) -> None:
        """Refuse attributes that exclude each other.

        Raises:
            TypeError: If the queue is not an OutfeedQueue, or the mask not a list of bools.
            ValueError: If attributes exclude each other or lack another one.
        """
        if not isinstance(self.queue, OutfeedQueue | None):
            raise wrong_type("outfeed_queue", self.queue, "use an OutfeedQueue")
        is_list = isinstance(self.mask, Sequence) and all(isinstance(one, bool | np.bool_) for one in self.mask)
        if self.mask is not None and not is_list:
            raise wrong_type(
                "outfeed_mask", self.mask, "it must be a list of bools, one for each output of the last stage"
            )
        wanted = {"outfeed_loss": self.loss, "outfeed_mask": self.mask is not None}
        if all(wanted.values()):
            raise ValueError("both outfeed_loss and outfeed_mask are given, but only one of them can be used: drop one")
        for name, is_given in wanted.items():
            if is_given and not learns:
                raise ValueError(f"An optimizer_function must be provided when {name} is given; give one, or drop it")
        wanted["accumulate_outfeed"] = self.accumulates
        for name, is_given in wanted.items():
            if is_given and self.queue is None:
                raise ValueError(
                    f"An outfeed_queue must be provided when {name} is given, but no outfeed_queue has been provided; "
                    f"give one, or leave {name} out"
                )
        if self.accumulates and self.queue is not None and self.queue.mode is not OutfeedMode.ALL:
            raise ValueError("accumulate_outfeed is given, but the outfeed's mode is LAST; use OutfeedMode.ALL")

    def check_outputs(self, outputs: Sequence[Tree]) -> None:
        """Refuse outputs that the outfeed cannot take.

        Raises:
            ValueError: If there is no outfeed, the mask has another length, or a dtype does not exist.
        """
        if self.queue is None and jax.tree.leaves(outputs):
            raise ValueError(
                f"The last computational stage has tensor outputs: {outputs}, but no outfeed_queue has been provided; "
                "give one"
            )
        if self.mask is not None and len(self.mask) != len(outputs):
            raise ValueError(
                f"outfeed_mask has {len(self.mask)} entries, but the last stage has {len(outputs)} outputs; give one "
                "entry for each output"
            )
        if self.accumulates:
            for output in jax.tree.leaves(self.chosen(outputs, jax.ShapeDtypeStruct((), np.float32))):
                self._dtype_for(output)

    def chosen(self, outputs: Sequence[Tree], loss: jax.Array | jax.ShapeDtypeStruct) -> Tree:
        """Return the outputs of a micro-batch for the outfeed, or None without an outfeed."""
        if self.queue is None:
            return None
        if self.loss:
            return loss
        mask = self.mask or [False] * len(outputs)
        return [output for output, is_dropped in zip(outputs, mask, strict=True) if not is_dropped]

    def summed(self, outputs: Sequence[Tree]) -> Tree:
        """Return the sum of the outputs of all micro-batches, added one after another."""
        return jax.tree.map(self._sum, *outputs)

    def _dtype_for(self, output: np.ndarray | jax.ShapeDtypeStruct) -> np.dtype:
        dtype = self.dtype(output) if asks_for_each(self.dtype) else self.dtype
        try:
            found: np.dtype = np.dtype(output.dtype if dtype is None else dtype)
        except TypeError as error:
            raise ValueError(
                f"accumulate_outfeed_dtype is {dtype!r} for an output of shape {list(output.shape)}; use None, a "
                "dtype, or a function of the output that returns one"
            ) from error
        return found

    def _sum(self, *leaves: jax.Array) -> np.ndarray:
        first = np.asarray(leaves[0])
        total = np.zeros(first.shape, self._dtype_for(first))
        with np.errstate(over="ignore", invalid="ignore"):
            for leaf in leaves:
                total = (total + np.asarray(leaf).astype(total.dtype)).astype(total.dtype)
        return total
