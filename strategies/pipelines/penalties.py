"""Penalties on weights in a loss function in stages: they belong to the stages that use these weights."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

from strategies.programs.jaxpr import Equation, Graph, Variable, variables

Place: TypeAlias = tuple[int, int]
"""A stage, and a function of it."""


def homes_of_penalties(
    graph: Graph, homes: Mapping[int, Place], weights: Collection[int], last: Place
) -> dict[int, Place]:
    """Where numbers are made that depend on weights alone, and that only later stages add to the loss.

    Otherwise the stage that adds them would read the weights too, which are on the device of another one: what Keras's
    regularizers say is added up behind the last stage.

    Args:
        graph: of the loss function.
        homes: where its equations are, but for those that depend on no stage.
        weights: the numbers of its arguments that are weights.
        last: where results are needed that no stage makes.

    Returns:
        The places of such equations, and of those that depend on them.
    """
    needed = _needed(graph, homes, last)
    behind: dict[Variable, Place] = {  # the latest stage that is the first one to use a weight behind a value
        graph.arguments[number]: min(needed[graph.arguments[number]])
        for number in weights
        if needed[graph.arguments[number]]
    }
    found: dict[int, Place] = {}
    for number, equation in enumerate(graph.equations):
        own = max((behind[read] for read in variables(equation.invars) if read in behind), default=None)
        if number in homes or own is None:
            continue
        behind.update(dict.fromkeys(equation.outvars, own))
        before = [found[place] for place in map(graph.place, variables(equation.invars)) if place in found]
        if before or _is_penalty(equation, own, needed):
            found[number] = max([own, *before])
    return found


def _needed(graph: Graph, homes: Mapping[int, Place], last: Place) -> dict[Variable, set[Place]]:
    """Where values are read, by equations that have a home or through others that have none."""
    needed: dict[Variable, set[Place]] = defaultdict(set)
    for result in variables(graph.results):
        needed[result].add(last)
    for number, equation in reversed(list(enumerate(graph.equations))):
        places = {homes[number]} if number in homes else set().union(*(needed[made] for made in equation.outvars))
        for read in variables(equation.invars):
            needed[read] |= places
    return needed


def _is_penalty(equation: Equation, own: Place, needed: Mapping[Variable, set[Place]]) -> bool:
    places: set[Any] = set().union(*(needed[made] for made in equation.outvars))
    is_number = all(math.prod(made.aval.shape) == 1 for made in equation.outvars)
    return is_number and bool(places) and all(place[0] > own[0] for place in places)
