"""The learning rates that an optimizer has used, as far as its state and its schedules tell them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
import optax

from popdist.records.distribution_settings import LEARNING_RATE
from strategies.jax.programs.program import jit
from strategies.jax.updates.optimizers import AnyOptimizer, MapGradientOptimizer, Rate, StepOptimizer
from strategies.typing import Leaf, OptimizerState

Path: TypeAlias = tuple[object, ...]
Schedule: TypeAlias = Callable[[Leaf], Leaf]
_MOST_OBJECTS = 10_000
"""The most objects in which schedules are looked for."""
_UPDATE = "scale_by_schedule.<locals>.update_fn"
_OF_RATE = "scale_by_learning_rate.<locals>.<lambda>"
_INJECTED = tuple(
    kind
    for name in ("InjectStatefulHyperparamsState", "InjectHyperparamsState")
    if (kind := getattr(optax, name, None))
)
_KNOWN = (optax.ScaleByScheduleState, *_INJECTED)


@final
class LearningRates:
    """The learning rates of an optimizer, read from its state after an update.

    Known are schedules that optax's own optimizers and `optax.scale_by_learning_rate` take, the rates of
    `optax.inject_hyperparams`, and those that a `StepOptimizer` tells. A constant rate of optax is in no state.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: AnyOptimizer) -> None:
        self._optimizer = optimizer
        self._structure: jax.tree_util.PyTreeDef | None = None
        self._rates: Sequence[Rate] = ()
        self._program: Callable[[Sequence[Leaf], int], Sequence[jax.Array]] = _nothing

    def of(self, state: OptimizerState, steps: int) -> Callable[[int], Mapping[str, float]] | None:
        """Return a function that reads the rates of the last `steps` updates; see `Engine.learning_rates`."""
        leaves, structure = jax.tree.flatten(state)
        if self._structure is None or structure != self._structure:
            self._structure = structure
            self._rates = self._found(state)
            self._program = jit(partial(_computed, tuple(self._rates)), static_argnums=1)
        if not self._rates:
            return None
        # Copies, because the next update uses the state up.
        values = self._program([_in_reach(leaves[rate.leaf]) for rate in self._rates], steps)
        return partial(_read, [rate.name for rate in self._rates], values)

    def _found(self, state: OptimizerState) -> Sequence[Rate]:
        if isinstance(self._optimizer, StepOptimizer):
            return self._optimizer.rates
        return [] if isinstance(self._optimizer, MapGradientOptimizer) else rates_of(self._optimizer, state)


def rates_of(optimizer: optax.GradientTransformation, state: OptimizerState) -> Sequence[Rate]:
    """Return the learning rates of a gradient transformation of optax, as far as they can be known."""
    places = {path: number for number, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(state))}
    nodes = jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda node: isinstance(node, _KNOWN))
    counts = [path for path, node in nodes if isinstance(node, optax.ScaleByScheduleState)]
    schedules = list(_schedules_in(optimizer.update))
    found: list[tuple[Path, Path, Schedule | None]] = []
    if len(counts) == len(schedules):
        count = jax.tree_util.GetAttrKey("count")
        pairs = zip(counts, schedules, strict=True)
        found = [(path, (*path, count), schedule) for path, schedule in pairs if schedule is not None]
    inside = (jax.tree_util.GetAttrKey("hyperparams"), jax.tree_util.DictKey(LEARNING_RATE))
    found += [(path, (*path, *inside), None) for path, node in nodes if isinstance(node, _INJECTED)]
    leaves = jax.tree.leaves(state)
    known = [(path, places[leaf], schedule) for path, leaf, schedule in found if leaf in places]
    known = [each for each in known if _is_one_number(leaves[each[1]], each[2])]
    names = _names([path for path, _, _ in known])
    return [Rate(name, place, schedule) for name, (_, place, schedule) in zip(names, known, strict=True)]


def _is_one_number(leaf: Leaf, schedule: Schedule | None) -> bool:
    """Return whether a rate is a scalar; a rate may also be an array that scales the elements of a variable."""
    if schedule is None:
        return np.shape(leaf) == ()
    rate = jax.eval_shape(schedule, jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype))
    return isinstance(rate, jax.ShapeDtypeStruct) and rate.shape == ()


def _names(paths: Sequence[Path]) -> list[str]:
    """Return "learning_rate", or for several rates one name each, with the label of `optax.partition` if it has one."""
    if len(paths) == 1:
        return [LEARNING_RATE]
    labels = ["/".join(str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)) for path in paths]
    are_different = len({*labels, ""}) == len(paths) + 1
    return [f"{LEARNING_RATE}/{label if are_different else number}" for number, label in enumerate(labels)]


def _schedules_in(update: object) -> Iterator[Schedule | None]:
    """Yield the learning rate's schedule of each `optax.scale_by_schedule` in an update, in the order of their states.

    None stands for another schedule, which is not known to be a learning rate. optax has no other way to its schedules
    than through the functions that hold them.
    """
    seen: set[int] = set()
    waiting = [update]
    while waiting and len(seen) < _MOST_OBJECTS:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, FunctionType) and found.__qualname__ == _UPDATE:
            yield _rate_in(_held_by(found).get("step_size_fn"))
            continue
        waiting.extend(reversed(list(_parts_of(found))))


def _rate_in(schedule: object) -> Schedule | None:
    """Return the learning rate's schedule in a schedule of `optax.scale_by_learning_rate`; None in any other one."""
    if not isinstance(schedule, FunctionType) or schedule.__qualname__ != _OF_RATE:
        return None
    found = _held_by(schedule).get(LEARNING_RATE)
    return found if callable(found) else None


def _parts_of(found: object) -> Iterable[object]:
    """Return what a function, a method or a container holds."""
    if isinstance(found, FunctionType):
        return _held_by(found).values()
    if isinstance(found, MethodType):
        return [*vars(found.__self__).values(), found.__func__] if hasattr(found.__self__, "__dict__") else ()
    if isinstance(found, functools.partial):
        return found.func, *found.args, *found.keywords.values()
    if isinstance(found, tuple | list):
        return found
    if isinstance(found, dict):  # in the order of pytrees
        return [found[key] for key in sorted(found, key=str)]
    return ()


def _held_by(function: FunctionType) -> dict[str, object]:
    """Return the values that a function has taken from the functions around it, by name."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if _is_filled(cell)}


def _is_filled(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _in_reach(leaf: Leaf) -> Leaf:
    """Return an array that a program can read; the memory of an offloaded state is no device's."""
    kind = getattr(getattr(leaf, "sharding", None), "memory_kind", None)
    return np.asarray(leaf) if kind == "pinned_host" else leaf


def _nothing(picked: Sequence[Leaf], steps: int) -> Sequence[jax.Array]:
    return ()


def _computed(rates: Sequence[Rate], picked: Sequence[Leaf], steps: int) -> list[jax.Array]:
    """Return for each rate its values in the last updates, or only that in the last one; traceable."""
    values = []
    for rate, leaf in zip(rates, picked, strict=True):
        if rate.schedule is None:
            values.append(jnp.reshape(leaf, (1,)).astype(jnp.float32))
            continue
        counts = jnp.maximum(leaf - jnp.arange(steps, 0, -1, dtype=leaf.dtype), 0)  # those of before each update
        values.append(jax.lax.map(partial(_scheduled, rate.schedule), counts))
    return values


def _scheduled(schedule: Schedule, count: jax.Array) -> jax.Array:
    return jnp.asarray(schedule(count), jnp.float32)


def _read(names: Sequence[str], values: Sequence[jax.Array], later: int) -> Mapping[str, float]:
    found = {name: np.asarray(value) for name, value in zip(names, values, strict=True)}
    return {name: float(value[-1 - later]) for name, value in found.items() if later < len(value)}
