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


@functools.cache
def compile_one_after_another() -> None:
    """Have threads of this process compile in turn: who is second finds in JAX's cache what the first has compiled.

    All of them would compile the same programs at once, each for itself. Where JAX has no such function, they do.
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
    """Have programs with collectives or feeds be kept, which JAX's own cache leaves out, beside what it keeps.

    What is compiled knows the functions that it calls by their numbers only; each program that is loaded from it has
    its own. Where JAX has no such functions, all programs are compiled.
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
    """Compiled programs by their keys, in this process, and for others in the folder of JAX's own cache."""

    def __init__(self) -> None:
        self._here: dict[str, bytes] = {}

    def get(self, key: str) -> bytes | None:
        """The program, None where there is none."""
        if key not in self._here:
            with suppress(OSError):
                self._here[key] = _file_of(key).read_bytes()
        return self._here.get(key)

    def put(self, key: str, program: bytes) -> None:
        """Keep a program; others see all of it, or nothing."""
        self._here[key] = program
        with suppress(OSError):  # a disk that is full
            file = _file_of(key)
            file.parent.mkdir(parents=True, exist_ok=True)
            mine = file.with_name(f"{key}.{os.getpid()}")
            mine.write_bytes(program)
            mine.replace(file)


def _file_of(key: str) -> Path:
    """Where a program lies, or would lie if the processes of the tests shared a folder; pytest has set it by now."""
    return Path(os.environ.get("JAX_COMPILATION_CACHE_DIR", os.devnull), "calling-python", key)
