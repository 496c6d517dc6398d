"""Programs that are compiled once: a folder of executables, one compiling instance per host, and reasons to log.

`poprun --executable-cache-path` names the folder, in which JAX's compilation cache keeps executables.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import strategies.trees as trees
from popdist.records.private_files import fault_of, fault_of_entries, make_private
from strategies.jax.programs.determinism import way_out_of_refusals
from strategies.late_jax import distributed, jax
from strategies.typing import Function, Tree

logger = logging.getLogger(__name__)

VARIABLE = "POPDIST_EXECUTABLE_CACHE_PATH"
"""Folder for compiled programs: `--executable-cache-path`. Empty keeps none. Default: on GPUs a temporary folder."""
WAIT_S = 600.0
"""The seconds that an instance waits for another one of its host to compile; then it compiles by itself."""
_POLL_S = 0.02
_CALLBACKS = ("python_cpu_callback", "python_gpu_callback")
_NEVER_KEPT_BYTES = 1 << 62
_waited_in_vain: set[Path] = set()
"""Folders whose lock this process has once waited for up to the limit; it does not wait for them again."""


def executables_folder(environ: Mapping[str, str], configured: str = "") -> Path | None:
    """Make the folder of the executables, if one is named, and return it.

    XLA compiles for the processor that it runs on, so each kind of processor has a folder of its own inside. Anybody
    who can write there decides what this process runs. So both folders are made for this user alone, and refused if
    anybody but this user and root can write to them. A folder without permission to write is only read.

    Args:
        environ: Environment variables; `VARIABLE` names the folder.
        configured: `serialization_output_folder` of the configuration in force, used without `VARIABLE`; "" for none.

    Raises:
        ValueError: The folder cannot be made, or others can write to it.
    """
    named = environ.get(VARIABLE) or configured
    if not named:
        return None
    return _private_folder(named, VARIABLE if environ.get(VARIABLE) else "serialization_output_folder")


def use_executable_cache(environ: Mapping[str, str], configured: str = "") -> Path | None:
    """Make JAX keep all executables in `executables_folder`, and return it. Call it before JAX compiles anything."""
    folder = executables_folder(environ, configured)
    if folder is None:
        return None
    is_written = os.access(folder, os.W_OK, effective_ids=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1 if is_written else _NEVER_KEPT_BYTES)
    return folder


def usual_folder(environ: Mapping[str, str]) -> str:
    """Return this user's folder on this host for executables of GPUs; "" if `VARIABLE` is set or there can be none.

    Two compilations of a program for a GPU may fuse it differently (openxla/xla#49047), and so give different bits. All
    instances of a host, in this job and later ones, run the executable that one of them has compiled.

    Args:
        environ: Environment variables; an empty `VARIABLE` turns the folder off.
    """
    if VARIABLE in environ:
        return ""
    folder = Path(os.path.realpath(tempfile.gettempdir()), f"popdist-executables-{os.geteuid()}")
    try:
        make_private(folder)
        fault = fault_of(folder)
    except OSError as error:
        fault = str(error)
    if fault:
        logger.info("no executables are kept: %s; name a folder with %s", fault, VARIABLE)
    return "" if fault else str(folder)


def _private_folder(named: str, said_by: str) -> Path:
    folder = Path(os.path.realpath(os.path.expanduser(named)), _processor())
    try:
        make_private(folder)
        fault = fault_of(folder.parent) or fault_of(folder) or fault_of_entries(folder)
    except OSError as error:
        raise ValueError(
            f"{said_by} is {named}, but no folder can be made there: {error.strerror}; "
            "name another folder (poprun --executable-cache-path)"
        ) from None
    if fault:
        raise ValueError(f"{said_by} is {named}, whose programs would be run, but {fault}")
    return folder


def _processor() -> str:
    """Return a name that is equal exactly for processors with the same instructions."""
    features = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:12]}"


def compile_in_turn(lowered: jax.stages.Lowered, folder: Path | None, wait_s: float = WAIT_S) -> jax.stages.Compiled:
    """Compile a program: one instance of the host compiles, and the others load the executable.

    The instances take turns in order of arrival. An instance that dies gives up its turn. An instance that has waited
    `wait_s` compiles by itself, and does not wait for that folder again. Programs that call back into Python are
    compiled by all instances, because JAX does not keep them.

    Args:
        lowered: Result of `jax.jit(...).lower(...)`.
        folder: Folder of the executables; None to compile at once.
        wait_s: The most seconds to wait for other instances.
    """
    is_kept = folder is not None and not _calls_back(lowered.as_text())
    with way_out_of_refusals(), _kept_in(folder, wait_s) if is_kept and folder else contextlib.nullcontext():
        return lowered.compile()


def _calls_back(text: str) -> bool:
    return any(each in text for each in _CALLBACKS)


@contextlib.contextmanager
def _kept_in(folder: Path, wait_s: float) -> Iterator[None]:
    """Hold the turn for a folder, while JAX keeps the compiled programs in it.

    If instances are connected by `jax.distributed`, JAX lets only the first one write (jax/_src/compiler.py). Here they
    write one after another.
    """
    process = distributed.global_state
    with turn(folder, wait_s) as is_held:
        number = process.process_id
        if is_held:
            process.process_id = 0
        try:
            yield
        finally:
            process.process_id = number


def compiled_in_turn(program: jax.stages.Wrapped, folder: Path | None, wait_s: float = WAIT_S) -> Function:
    """Return the same jitted program, which `compile_in_turn` compiles at its first call.

    Args:
        program: Result of `jax.jit`.
        folder: Folder of the executables; None to return `program`.
        wait_s: The most seconds to wait for other instances.
    """
    if folder is None:
        return program
    is_compiled = False

    def run(*arguments: Tree) -> Tree:
        nonlocal is_compiled
        if not is_compiled and not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arguments)):
            is_compiled = True
            compile_in_turn(program.lower(*arguments), folder, wait_s)
        return program(*arguments)

    return run


@contextlib.contextmanager
def turn(folder: Path, wait_s: float = WAIT_S) -> Iterator[bool]:
    """Hold a lock that one process of this host can hold for a folder; yield whether it was acquired in time.

    A process waits for `wait_s` only once per folder: a holder that takes so long is stopped, or compiles for hours.
    """
    # The kernel releases the lock when a process ends in any way.
    path = folder / f".compiling-on-{platform.node()}"
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:  # the folder is read-only
        logger.info("%s cannot be locked (%s); every instance compiles by itself", folder, error)
        yield False
        return
    try:
        yield _lock(descriptor, folder, wait_s)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path, wait_s: float) -> bool:
    deadline = time.monotonic() + (0 if folder in _waited_in_vain else wait_s)
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(_POLL_S)
                continue
            if folder not in _waited_in_vain:
                _waited_in_vain.add(folder)
                logger.warning("waited %g s for an instance that compiles in %s; not waiting again", wait_s, folder)
            return False
        except OSError as error:  # the file system has no locks
            logger.info("%s cannot be locked (%s); every instance compiles by itself", folder, error)
            return False
        return True


def explain_recompilation(seen: Sequence[Any], new: Any) -> str | None:
    """Return the reason why a program is compiled again, for the log; None if it is compiled for the first time.

    Args:
        seen: Pytrees of arrays, or of shapes with dtypes, for which it was compiled, in that order.
        new: Pytree for which it is compiled now.
    """
    if not seen:
        return None
    before, now = shapes_by_name(seen[-1]), shapes_by_name(new)
    changes = [
        f"{name or 'the batch'} was {before.get(name, 'absent')} and is {now.get(name, 'absent')}"
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name)
    ]
    reason = "; ".join(changes) or "its structure has changed"
    return f"compiled again, for the {_ordinal(len(seen) + 1)} time: {reason}; batches of one shape are compiled once"


def shapes_by_name(tree: Tree) -> dict[str, str]:
    """Return the dtype and shape of each array of a tree, such as `float32[3, 2]`, by its path."""
    leaves = trees.leaves_with_path(tree)
    return {trees.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
    return f"{number}{ending}"
