"""What the instances on the threads of a test compile, which they would do at the same time."""

from __future__ import annotations

import functools
import threading
from typing import Any

from jax._src import compiler


def compile_one_after_another() -> None:
    """Have threads of this process compile in turn: who is second finds in JAX's cache what the first has compiled.

    All of them would compile the same programs at once, each for itself. Where JAX has no such function, they do.
    """
    compile_or_find = getattr(compiler, "compile_or_get_cached", None)
    if compile_or_find is None or hasattr(compile_or_find, "__wrapped__"):
        return
    turn = threading.RLock()

    @functools.wraps(compile_or_find)
    def in_turn(*arguments: Any, **options: Any) -> Any:
        with turn:
            return compile_or_find(*arguments, **options)

    compiler.compile_or_get_cached = in_turn
