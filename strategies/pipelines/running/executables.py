"""Compiled programs of stages: those that compute the same, as equal layers do, are compiled once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from strategies.comparing.program_text import lines_of
from strategies.programs.jaxpr import every_equation
from strategies.programs.program import DeviceProgram

Compile = Callable[[Callable[..., Any], Sequence[int]], DeviceProgram]
"""(Function, which arguments are donated) -> the program of it."""


class Executables:
    """Compiles functions, and knows again what it has compiled.

    Args:
        compile_program: makes programs of functions.
    """

    def __init__(self, compile_program: Compile) -> None:
        self._compile = compile_program
        self._programs: dict[Any, DeviceProgram] = {}

    def __len__(self) -> int:
        """How many programs there are."""
        return len(self._programs)

    def compiled(
        self, device: jax.Device, function: Callable[..., Any], shapes: Sequence[Any], donated: Sequence[int] = ()
    ) -> Any:
        """The executable of a function for arguments of some shapes on a device.

        Args:
            device: where it runs.
            function: of flat arguments.
            shapes: of the arguments.
            donated: which of them are used up.
        """
        closed = jax.make_jaxpr(function)(*shapes)
        key = (tuple(lines_of(closed)), tuple(donated)) if _is_known_by_its_text(closed) else function
        if key not in self._programs:
            self._programs[key] = self._compile(function, donated)
        return self._programs[key].compiled(device, *shapes)


def _is_known_by_its_text(closed: core.ClosedJaxpr) -> bool:
    """Whether what it computes is in its text: all but what it calls in Python."""
    return not closed.effects and not any("callback" in one.primitive.name for one in every_equation(closed.jaxpr))
