"""Which profiler is to run, and in which steps; loads nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass

JAX, TORCH = "jax", "torch"
PROFILERS = (JAX, TORCH)
FORM = "jax or torch, then :STEPS or :all, then @FIRST, as in jax:20@100"
USUAL_STEPS, USUAL_FIRST = 5, 2
_ALL = "all"
_FORM = re.compile(r"(?P<profiler>\w+)(:(?P<steps>\w+))?(@(?P<first>\d+))?")


@dataclass(frozen=True)
class Wanted:
    """A profile.

    Attributes:
        profiler: one of `PROFILERS`.
        first: so many steps are made before it begins.
        steps: of which it is; None: of all that follow.
    """

    profiler: str
    first: int = USUAL_FIRST
    steps: int | None = USUAL_STEPS

    @classmethod
    def parse(cls, text: str) -> Wanted:
        """What is written as `FORM` says; the first two steps compile, and are left out unless all are asked for.

        Raises:
            ValueError: it is not.
        """
        found = _FORM.fullmatch(text)
        if found is None or found["profiler"] not in PROFILERS:
            raise ValueError(f"{text!r} names no profile; write {FORM}")
        steps = found["steps"] or str(USUAL_STEPS)
        if steps != _ALL and (not steps.isdecimal() or not int(steps)):
            raise ValueError(f"{text!r} asks for {steps} steps, a profile has at least one; write a number or {_ALL}")
        first = found["first"] or (0 if steps == _ALL else USUAL_FIRST)
        return cls(found["profiler"], int(first), None if steps == _ALL else int(steps))

    def begins_before(self, steps_made: int) -> bool:
        """Whether the step that begins behind so many is among them, or later."""
        return steps_made >= self.first

    def ends_before(self, steps_made: int) -> bool:
        """Whether the step that begins behind so many is later."""
        return self.steps is not None and steps_made >= self.first + self.steps
