"""The loss, norms and learning rates of a recorded training, beside the time of its steps. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from popdist.records.distribution_settings import GRADIENT_NORM, LEARNING_RATE, LOSS, WEIGHT_NORM
from poprun.trace.merging import RecordedJob
from poprun.trace.report.step_table import StepTable, last_attempt

_KINDS = (LOSS, GRADIENT_NORM, WEIGHT_NORM, LEARNING_RATE)
_ROWS = 10
"""The most steps in the table of the training."""
_LAYERS = 12
"""The most layers in the table of layers."""


@dataclass(frozen=True, eq=False)
class Curve:
    """A number that a training has told in some of its steps.

    Attributes:
        steps: The steps, increasing.
        time_s: The times of the measurements, in seconds since the first step of the report began.
        values: The numbers, some of which may not be finite.
    """

    steps: np.ndarray
    time_s: np.ndarray
    values: np.ndarray

    def at(self, step: int) -> float | None:
        """Return the number of a step, or None if it was not told."""
        place = int(np.searchsorted(self.steps, step))
        is_known = place < len(self.steps) and self.steps[place] == step
        return float(self.values[place]) if is_known else None

    @property
    def first_not_finite(self) -> int | None:
        """The first step whose number is not finite; None if all are."""
        places = np.flatnonzero(~np.isfinite(self.values))
        return int(self.steps[places[0]]) if len(places) else None


def curves_of(job: RecordedJob, table: StepTable) -> dict[str, Curve]:
    """Return what the training of a job has told in the steps of a table, by name; nothing if it has told nothing.

    All instances tell the same, so the first one that has told a loss is enough.
    """
    for place in last_attempt(job):
        spans = job.spans[place]
        if LOSS in spans.measured:
            began_ns = table.begin_ns.min()
            named = ((name, *spans.measured[name], spans.steps_of[name]) for name in _ordered(spans.measured))
            found = {name: _curve(steps, (when - began_ns) / 1e9, values) for name, when, values, steps in named}
            chosen = {name: _among(curve, table.steps) for name, curve in found.items()}
            return {name: curve for name, curve in chosen.items() if len(curve.steps)}
    return {}


def _ordered(measured: Mapping[str, object]) -> list[str]:
    """Return the names of a training's numbers: losses first, and the norm of all layers before those of each layer."""
    return sorted(
        (name for name in measured if name.partition("/")[0] in _KINDS),
        key=lambda name: (_KINDS.index(name.partition("/")[0]), "/" in name),
    )


def _curve(steps: np.ndarray, time_s: np.ndarray, values: np.ndarray) -> Curve:
    """Return a curve with the last measurement of each step, which a repeated step replaces."""
    known, from_the_end = np.unique(steps[::-1], return_index=True)
    places = len(steps) - 1 - from_the_end
    return Curve(known, time_s[places], values[places])


def _among(curve: Curve, steps: np.ndarray) -> Curve:
    chosen = np.isin(curve.steps, steps)
    return Curve(curve.steps[chosen], curve.time_s[chosen], curve.values[chosen])


def whole(curves: Mapping[str, Curve]) -> dict[str, Curve]:
    """Return the curves that are not of one layer."""
    of_layers = (GRADIENT_NORM, WEIGHT_NORM)
    return {name: curve for name, curve in curves.items() if name.partition("/")[0] not in of_layers or "/" not in name}


def layers_in(curves: Mapping[str, Curve]) -> list[str]:
    """Return the layers with a gradient norm, those with the largest growth over their median first."""
    named = {name.partition("/")[2]: curve for name, curve in curves.items() if name.startswith(f"{GRADIENT_NORM}/")}
    return sorted(named, key=lambda layer: -_growth(named[layer].values))


def _growth(norms: np.ndarray) -> float:
    finite = norms[np.isfinite(norms)]
    if len(finite) < len(norms):
        return float("inf")
    median = float(np.median(finite))
    return float(finite.max()) / median if median else 0.0


def title_of(name: str) -> str:
    """Return the title of a column: "gradient norm" for "gradient_norm"."""
    kind, slash, rest = name.partition("/")
    return kind.replace("_", " ") + slash + rest


def number_text(number: float | None) -> str:
    """Return a number with four digits; "-" for none."""
    return "-" if number is None else f"{number:.4g}"


def shown_steps(curves: Mapping[str, Curve]) -> list[int]:
    """Return at most `_ROWS` steps, evenly spaced, among those in which something other than a loss was told."""
    others = [curve.steps for name, curve in curves.items() if name not in (LOSS, LEARNING_RATE)]
    steps = np.unique(np.concatenate(others)) if others else curves[LOSS].steps
    places = np.unique(np.linspace(0, len(steps) - 1, min(_ROWS, len(steps))).round().astype(np.int64))
    found: list[int] = steps[places].tolist()
    return found


def layer_rows(curves: Mapping[str, Curve]) -> list[list[str]]:
    """Return the rows of a table of the norms of layers; none if no layer has told any."""
    layers = layers_in(curves)
    if not layers:
        return []
    title = ["", "gradient norm: first", "median", "largest", "in step", "last", "weight norm: first", "last"]
    return [title, *(_layer_row(curves, layer) for layer in layers[:_LAYERS])]


def _layer_row(curves: Mapping[str, Curve], layer: str) -> list[str]:
    gradient, weight = curves[f"{GRADIENT_NORM}/{layer}"], curves.get(f"{WEIGHT_NORM}/{layer}")
    norms = gradient.values
    place = int(np.argmax(np.where(np.isfinite(norms), norms, np.inf)))
    of_gradient = [norms[0], np.median(norms), norms[place]]
    ends = [None, None] if weight is None else [weight.values[0], weight.values[-1]]
    return [
        layer,
        *map(number_text, of_gradient),
        str(int(gradient.steps[place])),
        *map(number_text, [norms[-1], *ends]),
    ]


def failures(curves: Mapping[str, Curve]) -> list[str]:
    """Return sentences about numbers that are not finite; none if all are."""
    of_layers = [(name, curve.first_not_finite) for name, curve in curves.items()]
    found = [(step, name) for name, step in of_layers if step is not None]
    if not found:
        return []
    first = min(step for step, _ in found)
    names = [title_of(name) for step, name in found if step == first]
    return [f"In step {first} {_listed(names)} {'is' if len(names) == 1 else 'are'} not finite."]


def _listed(names: Sequence[str]) -> str:
    shown = list(names[:4]) if len(names) < 5 else [*names[:3], f"{len(names) - 3} more"]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
