"""What the instances on the threads of a test compile: the same programs, at the same time, again and again."""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from contextlib import suppress
from pathlib import Path
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
    """Have programs with collectives or feeds be kept, which JAX's own cache leaves out, beside what it keeps.

    What is compiled knows the functions that it calls by their numbers only; each program that is loaded from it has
    its own. Where JAX has no such functions, all programs are compiled.
    """
    compile_and_load = getattr(compiler, "backend_compile_and_load", None)
    canonical = getattr(cache_key, "_canonicalize_ir", None)
    if compile_and_load is None or canonical is None or hasattr(compile_and_load, "__wrapped__"):
        return
    kept = Kept(os.environ.get("JAX_COMPILATION_CACHE_DIR"))

    @functools.wraps(compile_and_load)
    def load_or_compile(backend: Any, module: Any, devices: Any, options: Any, host_callbacks: Any) -> Any:
        if not host_callbacks:
            return compile_and_load(backend, module, devices, options, host_callbacks)
        text = canonical(module, cache_key.IgnoreCallbacks.NO)  # without the lines of the source
        flags = os.environ.get("XLA_FLAGS", "").encode()
        key = hashlib.sha256(b"%d" % len(backend.devices()) + text + options.SerializeAsString() + flags).hexdigest()
        if (found := kept.get(key)) is not None:
            return backend.deserialize_executable(found, devices, options, host_callbacks)
        executable = compile_and_load(backend, module, devices, options, host_callbacks)
        kept.put(key, executable.serialize())
        return executable

    compiler.backend_compile_and_load = load_or_compile


class Kept:
    """Compiled programs by their keys, in this process, and in a folder for others.

    Args:
        folder: of JAX's own cache; without one they are lost with the process.
    """

    def __init__(self, folder: str | None) -> None:
        self._here: dict[str, bytes] = {}
        self._folder = folder and Path(folder, "calling-python")

    def get(self, key: str) -> bytes | None:
        """The program, None where there is none."""
        if key not in self._here and self._folder:
            with suppress(OSError):
                self._here[key] = Path(self._folder, key).read_bytes()
        return self._here.get(key)

    def put(self, key: str, program: bytes) -> None:
        """Keep a program; others see all of it, or nothing."""
        self._here[key] = program
        if self._folder:
            with suppress(OSError):  # a disk that is full
                Path(self._folder).mkdir(parents=True, exist_ok=True)
                mine = Path(self._folder, f"{key}.{os.getpid()}")
                mine.write_bytes(program)
                mine.replace(Path(self._folder, key))
