"""What the instances on the threads of a test compile: the same programs, at the same time, again and again."""

from __future__ import annotations

import functools
import hashlib
import threading
from typing import Any

from jax._src import cache_key, compiler


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


def compile_what_calls_python_once() -> None:
    """Have this process keep programs with collectives or feeds, which JAX's own cache leaves out.

    What is compiled knows the functions that it calls by their numbers only; each program that is loaded from it has
    its own. Where JAX has no such functions, all programs are compiled.
    """
    compile_and_load = getattr(compiler, "backend_compile_and_load", None)
    canonical = getattr(cache_key, "_canonicalize_ir", None)
    if compile_and_load is None or canonical is None or hasattr(compile_and_load, "__wrapped__"):
        return
    kept: dict[bytes, bytes] = {}

    @functools.wraps(compile_and_load)
    def load_or_compile(backend: Any, module: Any, devices: Any, options: Any, host_callbacks: Any) -> Any:
        if not host_callbacks:
            return compile_and_load(backend, module, devices, options, host_callbacks)
        text = canonical(module, cache_key.IgnoreCallbacks.NO)  # without the lines of the source
        key = hashlib.sha256(text + options.SerializeAsString()).digest()
        if key not in kept:
            executable = compile_and_load(backend, module, devices, options, host_callbacks)
            kept[key] = executable.serialize()
            return executable
        return backend.deserialize_executable(kept[key], devices, options, host_callbacks)

    compiler.backend_compile_and_load = load_or_compile
