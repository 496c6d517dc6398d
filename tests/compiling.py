"""Shared compilation of the programs that instances on threads of a test compile at the same time."""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from jax._src import cache_key, compiler


@functools.cache
def compile_one_after_another() -> None:
    """Let threads of this process compile in turn, so that later ones find earlier results in JAX's cache.

    Otherwise all of them would compile the same programs at once, as happens if this version of JAX lacks the function.
    """
    compile_or_find = getattr(compiler, "compile_or_get_cached", None)
    if compile_or_find is None:
        return
    turn = threading.RLock()

    @functools.wraps(compile_or_find)
    def in_turn(*arguments: Any, **options: Any) -> Any:
        with turn:
            return compile_or_find(*arguments, **options)

    compiler.compile_or_get_cached = in_turn


@functools.cache
def compile_what_calls_python_once() -> None:
    """Keep programs with collectives or feeds, which JAX's own cache omits, beside its files.

    A compiled program refers to the functions that it calls by numbers only; each loaded copy has its own functions.
    If this version of JAX lacks the functions used here, all programs are compiled.
    """
    compile_and_load = getattr(compiler, "backend_compile_and_load", None)
    canonical, ignored = getattr(cache_key, "_canonicalize_ir", None), getattr(cache_key, "IgnoreCallbacks", None)
    if compile_and_load is None or canonical is None or ignored is None:
        return
    kept = Kept()

    @functools.wraps(compile_and_load)
    def load_or_compile(backend: Any, module: Any, devices: Any, options: Any, host_callbacks: Any) -> Any:
        if not host_callbacks:
            return compile_and_load(backend, module, devices, options, host_callbacks)
        text = canonical(module, ignored.NO)  # without the lines of the source
        flags = os.environ.get("XLA_FLAGS", "").encode()
        key = hashlib.sha256(b"%d" % len(backend.devices()) + text + options.SerializeAsString() + flags).hexdigest()
        if (found := kept.get(key)) is not None:
            return backend.deserialize_executable(found, devices, options, host_callbacks)
        executable = compile_and_load(backend, module, devices, options, host_callbacks)
        kept.put(key, executable.serialize())
        return executable

    compiler.backend_compile_and_load = load_or_compile


class Kept:
    """Compiled programs by their keys, in this process, and for other processes in the folder of JAX's own cache."""

    def __init__(self) -> None:
        self._here: dict[str, bytes] = {}

    def get(self, key: str) -> bytes | None:
        """Return the program, or None if there is none."""
        if key not in self._here:
            with suppress(OSError):
                self._here[key] = _file_of(key).read_bytes()
        return self._here.get(key)

    def put(self, key: str, program: bytes) -> None:
        """Keep a program; other processes see all of it, or nothing."""
        self._here[key] = program
        with suppress(OSError):  # a full disk
            file = _file_of(key)
            file.parent.mkdir(parents=True, exist_ok=True)
            mine = file.with_name(f"{key}.{os.getpid()}")
            mine.write_bytes(program)
            mine.replace(file)


def _file_of(key: str) -> Path:
    """Return the path of a program, which exists if the processes of the tests share a folder; pytest has set it by
    now.
    """
    return Path(os.environ.get("JAX_COMPILATION_CACHE_DIR", os.devnull), "calling-python", key)
