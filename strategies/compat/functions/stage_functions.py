"""The functions of a pipeline, each of which takes the outputs of the function before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import CellType
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from strategies.jax.feeds.infeed import InfeedQueue
from strategies.pipelines.mapping import Stage
from strategies.pipelines.marks import function_of_stage, pipeline_stage
from strategies.typing import Function, Tree, Variables

_OUTPUT = "pipeline_stage_output"
_T = TypeVar("_T")


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

    def in_last_stage(self, function: Callable[..., _T], *arguments: Tree) -> _T:
        """Call a function as a part of the last stage."""
        with pipeline_stage(len(self.stages) - 1):
            return function(*arguments)

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


def tracers_in(value: Tree) -> Iterator[jax.Array]:
    """Yield the tracers in a pytree and in the closures of its functions."""
    return _look_into(value, set())


def _look_into(value: Tree, seen: set[int]) -> Iterator[jax.Array]:
    for leaf in jax.tree.leaves(value):
        if id(leaf) in seen:
            continue
        seen.add(id(leaf))
        if isinstance(leaf, jax.core.Tracer):
            yield leaf
        elif isinstance(leaf, partial):
            yield from _look_into([leaf.func, leaf.args, leaf.keywords], seen)
        else:
            yield from _look_into([_contents(cell) for cell in getattr(leaf, "__closure__", None) or ()], seen)


def _contents(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is still empty
        return None
