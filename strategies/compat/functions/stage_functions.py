"""The functions of a pipeline, each of which takes what the one before returns."""

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
    """The functions with which a pipeline computes a micro-batch, and where their arguments come from.

    Attributes:
        stages: a function, or a list of functions, for each.
        inputs: constants, the first arguments of the first stage.
        infeed: where the arguments behind them come from; None if there are none.
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
        """Return what the last stage returns for an element.

        Args:
            variables: of all stages.
            leaves: the arrays of the element.
            are_made: whether an equation of a stage makes each array that the stage returns. If not, an input that is
                handed through is still the constant.

        Raises:
            ValueError: if a stage returns nothing.
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
                    f"stage {number} of the pipeline returns nothing, and so computes nothing; return what the next "
                    "stage or the outfeed needs, or leave the stage out"
                )
        return result


def _made_here(result: Tree) -> Tree:
    """Have each array of what a stage returns be made by an equation of the stage, even if it is an input."""
    return jax.tree.map(lambda leaf: checkpoint_name(jnp.asarray(leaf), _OUTPUT), result)


def listed(result: Tree) -> list[Tree]:
    """Return what a stage returns as a list: a tuple or list, one value, or None for nothing."""
    if result is None:
        return []
    return list(result) if isinstance(result, list | tuple) else [result]


def tracers_in(value: Tree) -> Iterator[jax.Array]:
    """Yield the values of a program that is being traced, in a pytree or in the closures of functions in it."""
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
    except ValueError:  # not filled yet
        return None
