"""The functions of a pipeline, each of which takes the outputs of the function before, and their outfeed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from strategies.argument_checks import check_optional, wrong_type
from strategies.jax.feeds.infeed import InfeedQueue
from strategies.jax.feeds.outfeed import OutfeedMode, OutfeedQueue
from strategies.jax.gradients.model_state import asks_for_each
from strategies.pipelines.stages import Stage, function_of_stage, pipeline_stage
from strategies.typing import AccumulationDtype, Function, Tree, Variables

_OUTPUT = "pipeline_stage_output"


@dataclass(frozen=True)
class StageFunctions:
    """The functions that compute a micro-batch of a pipeline, and the sources of their arguments.

    Attributes:
        stages: For each stage, a function or a list of functions.
        inputs: Constants, the first arguments of the first stage.
        infeed: Source of the arguments after them, or None.
    """

    stages: Sequence[Stage]
    inputs: Sequence[jax.Array]
    infeed: InfeedQueue | None

    @property
    def all_stages(self) -> list[Function]:
        """Each function of each stage."""
        return [one for stage in self.stages for one in (stage if isinstance(stage, Sequence) else (stage,))]

    @property
    def spec(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes and dtypes of the arrays of an element."""
        return [] if self.infeed is None else list(self.infeed.spec.leaves)

    def outputs(self, variables: Variables, leaves: Sequence[jax.Array], are_made: bool = True) -> Tree:
        """Return the last stage's outputs for an element.

        Args:
            variables: Variables of all stages.
            leaves: Arrays of the element.
            are_made: Whether an equation of a stage makes each array that the stage returns. If not, an input that a
                stage passes on stays the constant.

        Raises:
            ValueError: If a stage returns nothing.
        """
        made = _made_here if are_made else lambda result: result
        values = list(self.inputs)
        named: Mapping[str, Tree] = {}
        if self.infeed is not None:
            given, named = self.infeed.spec.arguments(leaves)
            values += given
        result: Tree = None
        for number, stage in enumerate(self.stages):
            if callable(stage):
                with pipeline_stage(number):
                    result = made(stage(variables, *values, **named))
            else:
                result = []
                for place, function in enumerate(stage):
                    with function_of_stage(number, place):
                        result += listed(made(function(variables, *values, **named)))
            values, named = listed(result), {}
            if not values:
                raise ValueError(
                    f"stage {number} of the pipeline returns nothing, and so computes nothing; return the inputs of "
                    "the next stage or of the outfeed, or leave the stage out"
                )
        return result


def _made_here(result: Tree) -> Tree:
    """Make an equation of the stage produce each array that the stage returns, even if the array is an input."""
    return jax.tree.map(lambda leaf: checkpoint_name(jnp.asarray(leaf), _OUTPUT), result)


def listed(result: Tree) -> list[Tree]:
    """Return a stage's result as a list, given a tuple, a list, one value, or None for nothing."""
    if result is None:
        return []
    return list(result) if isinstance(result, list | tuple) else [result]


def tracers_in(value: Tree, seen: set[int] | None = None) -> Iterator[jax.Array]:
    """Yield the tracers in a pytree and in the closures of its functions, except for those in objects `seen` by id."""
    seen = set() if seen is None else seen
    for leaf in jax.tree.leaves(value):
        if id(leaf) in seen:
            continue
        seen.add(id(leaf))
        if isinstance(leaf, jax.core.Tracer):
            yield leaf
        elif isinstance(leaf, partial):
            yield from tracers_in([leaf.func, leaf.args, leaf.keywords], seen)
        else:
            for cell in getattr(leaf, "__closure__", None) or ():
                with suppress(ValueError):  # the cell is still empty
                    yield from tracers_in(cell.cell_contents, seen)


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
        check_optional("outfeed_queue", self.queue, OutfeedQueue)
        is_list = isinstance(self.mask, Sequence) and all(isinstance(one, bool | np.bool_) for one in self.mask)
        if self.mask is not None and not is_list:
            expected = "it must be a list of bools, one for each output of the last stage"
            raise wrong_type("outfeed_mask", self.mask, expected)
        if self.loss and self.mask is not None:
            raise ValueError("both outfeed_loss and outfeed_mask are given, but only one of them can be used: drop one")
        wanted = {"outfeed_loss": self.loss, "outfeed_mask": self.mask is not None}
        for name, is_given in {**wanted, "accumulate_outfeed": self.accumulates}.items():
            if is_given and not learns and name in wanted:
                raise ValueError(f"An optimizer_function must be provided when {name} is given; give one, or drop it")
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
                f"outfeed_mask has {len(self.mask)} entries, but {len(outputs)} outputs of the last stage need one each"
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
