"""Arrays in memory of the host in which a training goes on."""

from __future__ import annotations

from typing import final

import numpy as np


class Age:
    """How often what lies in some memory has been replaced.

    Attributes:
        number: of replacements.
    """

    def __init__(self) -> None:
        self.number = 0


@final
class HostArray(np.ndarray):
    """A view of memory in which the next step writes what follows; it is used up then, as arrays of JAX are.

    Checkpoints hand such arrays on as they are, whereas arrays of JAX have no 64 bits.
    """

    _age: Age | None = None
    _born = 0

    @classmethod
    def of(cls, array: np.ndarray, age: Age) -> HostArray:
        """The array, until its memory is replaced."""
        view = array.view(cls)
        view._age, view._born = age, age.number
        return view

    def is_deleted(self) -> bool:
        """Whether a step has used it up."""
        return self._age is not None and self._age.number != self._born
