"""Norms and distributions of weights and mean gradients, layer by layer, for sinks of metrics."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from collectives.instruments import is_seen
from popdist.instance import replica_blocks
from popdist.records.distribution_settings import GRADIENT_NORM, WEIGHT_NORM, DistributionSettings
from strategies.core.members import Members
from strategies.core.metrics import ReadingOfSteps, UnreadArray
from strategies.exchange.shards import Shards
from strategies.sinks.distribution import Distribution
from strategies.sinks.sink import Row
from strategies.typing import Leaf, Tree

_GRADIENTS, _WEIGHTS = "gradients", "weights"
_NOT_IN_NAMES = re.compile(r"[^\w./ -]")
_MOST_LETTERS = 200
"""The most letters of a layer's name. MLflow takes 250 for the name of a number, such as `gradients/LAYER/p50`."""
_CHUNK = 1 << 15
"""The elements that are squared at once; 256 KiB in float64, which a core's cache holds."""


def _on_host(leaf: Leaf) -> np.ndarray:
    return np.asarray(leaf)


@dataclass(frozen=True)
class Layers:
    """The trained variables of a step and their mean gradients, before the update.

    Attributes:
        names: Name of each variable; see `layer_names`.
        variables: The variables, whole.
        gradients: The mean gradient of each variable times `divisor`; None for a variable without one. If there are
            `shards`, a gradient that they divide is this instance's part.
        divisor: The loss scale times the mean weight of the losses, as far as gradients are not divided by them yet. A
            number, or an unread scalar on a device.
        shards: The division of the gradients; None if they are whole.
        on_host: Returns an array in the memory of the host.
        gathered: Returns a mean gradient, whole, given its number and its part. Collective.
        device_norms: Returns the unread norms of arrays on a device; None if all arrays are on the host.
    """

    names: Sequence[str]
    variables: Sequence[Leaf]
    gradients: Sequence[Leaf]
    divisor: UnreadArray = 1.0
    shards: Shards | None = None
    on_host: Callable[[Leaf], np.ndarray] = _on_host
    gathered: Callable[[int, Leaf], np.ndarray] = lambda number, part: _on_host(part)
    device_norms: Callable[[Sequence[Leaf]], UnreadArray] | None = None

    def is_cut(self, number: int) -> bool:
        """Return whether a gradient is this instance's part."""
        variable, gradient = self.variables[number], self.gradients[number]
        if gradient is None or self.shards is None or not self.shards.divides(variable):
            return False
        return tuple(gradient.shape) != tuple(variable.shape)


@dataclass(frozen=True)
class LayerLook:
    """The results of a look at a step.

    Attributes:
        step: Number of steps so far, including this one.
        read: Reads the norms of the step; waits for a device.
        distributions: Distributions by name.
    """

    step: int
    read: ReadingOfSteps
    distributions: Mapping[str, Distribution] = field(default_factory=dict)

    @property
    def told(self) -> list[object]:
        """The results as values of JSON, for an instance that lacks them; waits for a device."""
        return [self.step, dict(self.read(0)), {name: each.told for name, each in self.distributions.items()}]

    @classmethod
    def heard(cls, told: Tree) -> LayerLook:
        """Return results from `told`, with the same bits."""
        step, norms, of_all = told
        distributions = {name: Distribution.heard(each) for name, each in of_all.items()}
        return cls(step, lambda later: {} if later else norms, distributions)


def layer_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return names that all sinks accept: short relative paths of letters, digits, and `_. -`; all are different."""
    found: dict[str, None] = {}
    for name in names:
        parts = _NOT_IN_NAMES.sub("_", name).strip().split("/")
        plain = "/".join(part for part in parts if part not in ("", ".", ".."))[-_MOST_LETTERS:].strip("/")
        plain = plain or "variables"
        number, chosen = 1, plain
        while chosen in found:
            number += 1
            chosen = f"{plain}_{number}"
        found[chosen] = None
    return tuple(found)


def look(settings: DistributionSettings, step: int, layers: Callable[[], Layers], members: Members) -> LayerLook | None:
    """Return the norms and distributions of a step if they are due. Collective if gradients are in parts.

    The values have the same bits however the replicas are spread over instances.

    Args:
        settings: Steps in which norms and histograms are taken.
        step: Number of steps before this one.
        layers: Returns the layers of the step.
        members: The instances.
    """
    if not settings.are_due(step):
        return None
    norms, histograms, known = settings.norms_are_due(step), settings.histograms_are_due(step), layers()
    with np.errstate(all="ignore"):  # of layers whose training has failed
        return LayerLook(
            step + 1,
            _norms(known, members) if norms else _no_norms,
            _distributions(known) if histograms else {},
        )


def tell_look(members: Members, seen: LayerLook | None, prefix: str) -> None:
    """Hand the norms and distributions of a step to sinks and instruments, without metrics.

    Args:
        members: The instances.
        seen: The look at the step; None if nothing was due.
        prefix: Beginning of all names.
    """
    if seen is None:
        return
    numbers = {f"{prefix}{name}": number for name, number in seen.read(0).items()}
    distributions = {f"{prefix}{name}": each for name, each in seen.distributions.items()}
    for sinks in members.sinks:
        sinks.add(Row(seen.step, lambda: numbers, distributions=distributions))
    if numbers and is_seen(members.instruments.step_numbers):
        members.instruments.step_numbers(numbers)


def _no_norms(later: int) -> Mapping[str, float]:
    return {}


def _distributions(layers: Layers) -> dict[str, Distribution]:
    found = {}
    for number, (name, variable, gradient) in enumerate(
        zip(layers.names, layers.variables, layers.gradients, strict=True)
    ):
        found[f"{_WEIGHTS}/{name}"] = Distribution.of(layers.on_host(variable))
        if gradient is not None:
            whole = layers.gathered(number, gradient) if layers.is_cut(number) else layers.on_host(gradient)
            divisor = float(layers.divisor)
            found[f"{_GRADIENTS}/{name}"] = Distribution.of(whole if divisor == 1 else _divided(whole, divisor))
    return found


def _divided(array: np.ndarray, divisor: float) -> np.ndarray:
    dtype = array.dtype if array.dtype == np.float64 else np.float32
    quotient: np.ndarray = array.astype(dtype) / np.asarray(divisor, dtype)
    return quotient


def _norms(layers: Layers, members: Members) -> ReadingOfSteps:
    """Return a function that reads the norms; those of arrays on the host are computed now."""
    weights = _norms_of(layers.variables, layers, members)
    gradients = _norms_of(layers.gradients, layers, members, [*map(layers.is_cut, range(len(layers.names)))])
    divisor, names = layers.divisor, layers.names

    def read(later: int) -> Mapping[str, float]:
        if later:
            return {}
        found = {}
        with np.errstate(all="ignore"):  # in the thread of a sink, of a step without weight or a failed training
            of_weights = np.asarray(weights, np.float64)
            of_gradients = np.asarray(gradients, np.float64) / float(divisor)
            for kind, norms in ((GRADIENT_NORM, of_gradients), (WEIGHT_NORM, of_weights)):
                found[kind] = float(np.sqrt(np.square(norms).sum()))
                found |= {f"{kind}/{name}": norm for name, norm in zip(names, norms.tolist(), strict=True)}
        return found

    return read


def _norms_of(
    leaves: Sequence[Leaf], layers: Layers, members: Members, are_cut: Sequence[bool] | None = None
) -> UnreadArray:
    cut = np.flatnonzero(are_cut) if are_cut else np.zeros(0, np.int64)
    are_on_host = all(leaf is None or isinstance(leaf, np.ndarray) for leaf in leaves)
    if layers.device_norms is not None and not are_on_host and not len(cut):
        return layers.device_norms(leaves)
    replicas = members.num_replicas_in_sync
    sums = np.zeros((len(leaves), replicas))
    for number, leaf in enumerate(leaves):
        if leaf is not None and number not in cut:
            sums[number] = squares_of_shards(layers.on_host(leaf).reshape(-1), replicas)
    if len(cut):
        assert layers.shards is not None
        parts = [(layers.on_host(leaves[number]), layers.variables[number]) for number in cut.tolist()]
        own = [_own_squares(part, variable, layers.shards) for part, variable in parts]
        sums[cut] = _of_all_replicas(np.array(own), members)
    return np.sqrt(sums.sum(axis=1))


def squares_of_shards(flat: np.ndarray, count: int) -> np.ndarray:
    """Return the sum of the squares in each of `count` equal shards, float64 `[count]`; zeros fill up the last ones.

    The bits of a sum depend on the elements of its shard alone: neither on the other shards nor on the memory.
    """
    part = -(-flat.size // count)
    sums = np.zeros(count)
    if not part:
        return sums
    full, rest = divmod(flat.size, part)
    sums[:full] = squares_of_rows(flat[: full * part].reshape(full, part))
    if rest:
        last = np.zeros((1, part), flat.dtype)
        last[0, :rest] = flat[full * part :]
        sums[full] = squares_of_rows(last)[0]
    return sums


def squares_of_rows(rows: np.ndarray) -> np.ndarray:
    """Return the sum of the squares in each row, float64."""
    count, size = rows.shape
    sums = np.zeros(count)
    together = max(1, _CHUNK // max(size, 1))
    for first in range(0, count, together):
        for start in range(0, size, _CHUNK):
            part = rows[first : first + together, start : start + _CHUNK].astype(np.float64)
            sums[first : first + together] += np.add.reduce(np.multiply(part, part, out=part), axis=1)
    return sums


def _own_squares(part: np.ndarray, variable: Leaf, shards: Shards) -> np.ndarray:
    """Return the sum of the squares of a gradient in the shard of each local replica."""
    size = shards.local * shards.part(variable)
    own = part.reshape(-1)[:size]
    if own.size < size:
        own = np.pad(own, (0, size - own.size))
    return squares_of_rows(own.reshape(shards.local, -1))


def _of_all_replicas(own: np.ndarray, members: Members) -> np.ndarray:
    """Return values of all replicas, in their order along the last axis, given those of local ones. Collective."""
    replicas = members.num_replicas_in_sync
    found = members.communicator.all_gather(np.ascontiguousarray(own), name="norms of parts of gradients")
    parts = found.reshape(-1, *own.shape)
    blocks = replica_blocks(len(parts), replicas)
    return np.concatenate([part[:, : len(block)] for part, block in zip(parts, blocks, strict=True)], axis=1)
