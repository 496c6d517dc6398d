"""The steps in which norms and histograms of weights and gradients are taken, and their names; loads no library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from popdist.errors import EnvironmentMismatchError

NORMS_VARIABLE = "POPDIST_NORMS_EVERY"
"""Number of steps between two looks at the norms of weights and gradients, or 0 for none: `--norms-every`."""
HISTOGRAMS_VARIABLE = "POPDIST_HISTOGRAMS_EVERY"
"""Number of steps between two histograms of weights and gradients, or 0 for none: `--histograms-every`."""

LOSS, GRADIENT_NORM, WEIGHT_NORM, LEARNING_RATE = "loss", "gradient_norm", "weight_norm", "learning_rate"
"""The names of metrics; the norm of a layer is called `gradient_norm/LAYER`, and rates may be `learning_rate/GROUP`."""


@dataclass(frozen=True)
class DistributionSettings:
    """The steps in which a training looks at its weights and gradients. The first step is always among them.

    Attributes:
        norms_every: Number of steps from one look at the norms to the next; 0 for none.
        histograms_every: Number of steps from one look at the histograms to the next; 0 for none.

    Raises:
        TypeError: A number is not an integer.
        ValueError: A number is negative.
    """

    norms_every: int = 0
    histograms_every: int = 0

    def __post_init__(self) -> None:
        for name, number in (("norms_every", self.norms_every), ("histograms_every", self.histograms_every)):
            if isinstance(number, bool) or not isinstance(number, int):
                raise TypeError(f"{name} is {number!r}, which is not an integer; give a number of steps, or 0 for none")
            if number < 0:
                raise ValueError(f"{name} is {number}, which is negative; give a number of steps, or 0 for none")

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> DistributionSettings:
        """Read the settings from the environment.

        Raises:
            EnvironmentMismatchError: A variable is not a whole number.
        """
        return cls(_steps_in(environ, NORMS_VARIABLE), _steps_in(environ, HISTOGRAMS_VARIABLE))

    @property
    def are_on(self) -> bool:
        """Whether the training looks at anything."""
        return bool(self.norms_every or self.histograms_every)

    @property
    def words(self) -> str:
        """The settings for messages."""
        return f"norms every {self.norms_every} and histograms every {self.histograms_every} steps (0: never)"

    def are_due(self, step: int) -> bool:
        """Return whether the step after `step` others looks at anything."""
        return self.norms_are_due(step) or self.histograms_are_due(step)

    def norms_are_due(self, step: int) -> bool:
        """Return whether the step after `step` others looks at norms."""
        return bool(self.norms_every) and not step % self.norms_every

    def histograms_are_due(self, step: int) -> bool:
        """Return whether the step after `step` others looks at histograms."""
        return bool(self.histograms_every) and not step % self.histograms_every


def _steps_in(environ: Mapping[str, str], variable: str) -> int:
    text = environ.get(variable) or "0"
    if not (text.isascii() and text.isdecimal()):
        raise EnvironmentMismatchError(f"{variable}={text!r} is not a number of steps; use 0 for none, or unset it")
    return int(text)
