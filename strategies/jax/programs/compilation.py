"""Programs compiled once for a single device, a folder of executables, and reasons to log.

`poprun --executable-cache-path` names the folder, in which JAX's compilation cache keeps executables.

The last bits of results depend on the way in which XLA compiles a program. XLA compiles a program for several devices
differently from one for a single device (it merges common expressions earlier). On CPUs it divides a program among the
cores that the process may use at compilation. So programs of replicas and updates are never compiled for more than one
device, and always as if there were one core. Inside of large operations, the division of work depends only on the size
of XLA's thread pool, which is fixed (see `popdist.xla`).

The module also has the interface of variables that a function holds (`CapturedVariables`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import strategies.trees as trees
from popdist.records.private_files import fault_of, fault_of_entries, make_private
from strategies.jax.programs.xla_pitfalls import way_out_of_refusals
from strategies.late_jax import distributed, jax
from strategies.late_jax import jax_core as core
from strategies.typing import Function, Leaf, Tree

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


def compile_once_per_host(
    lowered: jax.stages.Lowered, folder: Path | None, wait_s: float = WAIT_S
) -> jax.stages.Compiled:
    """Compile a program: one instance of the host compiles, and the others load the executable.

    The instances take turns in order of arrival. An instance that dies gives up its turn. An instance that has waited
    `wait_s` compiles by itself, and does not wait for that folder again. Programs that call back into Python are
    compiled by all instances, because JAX does not keep them.

    Args:
        lowered: Result of `jax.jit(...).lower(...)`.
        folder: Folder of the executables; None to compile at once.
        wait_s: The most seconds to wait for other instances.
    """
    if folder is not None and any(each in lowered.as_text() for each in _CALLBACKS):
        folder = None
    with way_out_of_refusals(), contextlib.nullcontext() if folder is None else _kept_in(folder, wait_s):
        return lowered.compile()


@contextlib.contextmanager
def _kept_in(folder: Path, wait_s: float) -> Iterator[None]:
    """Hold the folder's lock while JAX caches compiled programs in it.

    If instances are connected by `jax.distributed`, JAX lets only the first one write (jax/_src/compiler.py). Here they
    write one after another.
    """
    process = distributed.global_state
    with folder_lock(folder, wait_s) as is_held:
        number = process.process_id
        if is_held:
            process.process_id = 0
        try:
            yield
        finally:
            process.process_id = number


def compiled_once_per_host(program: jax.stages.Wrapped, folder: Path | None, wait_s: float = WAIT_S) -> Function:
    """Return the same jitted program, which `compile_once_per_host` compiles at its first call.

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
            compile_once_per_host(program.lower(*arguments), folder, wait_s)
        return program(*arguments)

    return run


@contextlib.contextmanager
def folder_lock(folder: Path, wait_s: float = WAIT_S) -> Iterator[bool]:
    """Hold a lock that one process of this host can hold for a folder; yield whether it was acquired in time.

    A process waits for `wait_s` only once per folder: a holder that takes so long is stopped, or compiles for hours.
    """
    # The kernel releases the lock when a process ends in any way.
    path = folder / f".compiling-on-{platform.node()}"
    is_held = False
    with contextlib.ExitStack() as stack:
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, descriptor)
            is_held = _lock(descriptor, folder, wait_s)
        except OSError as error:  # the folder is read-only, or the file system has no locks
            logger.info("%s cannot be locked (%s); every instance compiles by itself", folder, error)
        yield is_held


def _lock(descriptor: int, folder: Path, wait_s: float) -> bool:
    deadline = time.monotonic() + (0 if folder in _waited_in_vain else wait_s)
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                break
            time.sleep(_POLL_S)
    if folder not in _waited_in_vain:
        _waited_in_vain.add(folder)
        logger.warning("waited %g s for an instance that compiles in %s; not waiting again", wait_s, folder)
    return False


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


# ---- programs

_PASSES = "xla_disable_hlo_passes"
_UNSEEN = nullcontext()
_LOOKS_AT_CORES = "cpu-parallel-task-assigner"


def compiler_options(environ: Mapping[str, str]) -> dict[str, str] | None:
    """Return `compiler_options` for `jax.jit` by which the number of cores does not decide bits; None on accelerators.

    Args:
        environ: Environment variables; XLA passes that the user has disabled in `XLA_FLAGS` stay disabled.
    """
    if jax.default_backend() != "cpu":
        return None
    disabled = re.findall(rf"--{_PASSES}=(\S+)", environ.get("XLA_FLAGS", ""))[-1:]
    return {_PASSES: ",".join([*disabled, _LOOKS_AT_CORES])}


def jit(function: Function, **options: Any) -> jax.stages.Wrapped:
    """Return `jax.jit` of a function, with `compiler_options`."""
    return jax.jit(function, compiler_options=compiler_options(os.environ), **options)


def shapes_of(tree: Tree) -> Tree:
    """Return the shapes and dtypes of a pytree of arrays and numbers."""

    def shape(leaf: Leaf) -> jax.ShapeDtypeStruct:
        array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        return jax.ShapeDtypeStruct(array.shape, array.dtype)

    return jax.tree.map(shape, tree)


def key_of(tree: Tree) -> Hashable:
    """Return a key that is equal for trees of the same structure, shapes and dtypes."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple([(leaf.shape, leaf.dtype) for leaf in leaves])


class DeviceProgram:
    """A function compiled once for each device and shapes of arguments; it may run in several threads at once.

    It is traced when it is compiled, and not when it runs.

    Args:
        function: Traceable function.
        executables: Folder of compiled programs, or None.
        donated: Positions of arguments whose memory the results may take over.
        compiling: Context that is entered while it is compiled.
    """

    def __init__(
        self,
        function: Function,
        executables: Path | None,
        donated: Sequence[int] = (),
        compiling: AbstractContextManager[None] = _UNSEEN,
    ) -> None:
        self._jitted = jit(function, donate_argnums=tuple(donated), keep_unused=bool(donated))
        self._executables = executables
        self._compiling = compiling
        self._traced: dict[Hashable, jax.stages.Traced] = {}
        self._compiled: dict[Hashable, jax.stages.Compiled] = {}

    def compiled(self, device: jax.Device, *arguments: Tree) -> jax.stages.Compiled:
        """Return the executable for a device and arguments of these shapes; it is traced once for all devices.

        Args:
            device: Device of the executable.
            arguments: Pytrees of arrays on that device, of host arrays and numbers, or of shapes.
        """
        key = _key(arguments)
        found = self._compiled.get((device, key))
        if found is None:
            with self._compiling:
                with jax.default_device(device):
                    lowered = self._trace(key, arguments).lower()
                found = self._compiled[device, key] = compile_once_per_host(lowered, self._executables)
        return found

    def equations(self, *arguments: Tree) -> core.ClosedJaxpr:
        """Return the equations that are compiled for arguments of these shapes."""
        closed: core.ClosedJaxpr = self._trace(_key(arguments), arguments).jaxpr
        return closed

    def results(self, *arguments: Tree) -> Tree:
        """Return the shapes and dtypes of the results for arguments of these shapes."""
        return self._trace(_key(arguments), arguments).out_info

    def _trace(self, key: Hashable, arguments: Sequence[Tree]) -> jax.stages.Traced:
        if key not in self._traced:
            self._traced[key] = self._jitted.trace(*arguments)
        return self._traced[key]


def _key(arguments: Sequence[Tree]) -> Hashable:
    leaves, structure = jax.tree.flatten(arguments)
    return structure, tuple([_type(leaf) for leaf in leaves]), _settings()


def _type(leaf: Leaf) -> Hashable:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.shape, leaf.dtype, bool(leaf.weak_type)
    aval = jax.typeof(leaf)
    return aval.shape, aval.dtype, bool(getattr(aval, "weak_type", False))


DECIDE_BITS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
)
"""The settings of JAX in a thread that decide how a function is traced, and the bits of its results."""


def _settings() -> Hashable:
    return tuple([getattr(jax.config, name) for name in (*DECIDE_BITS, "jax_debug_nans")])


# ---- variables beside arguments and results


class CapturedVariables(Protocol):
    """Variables that a function reads, such as those of Keras models; they become arguments and results of its program.

    `strategy.run` traces a new function in `inside`, gives each replica its `values`, and calls `put` after all local
    replicas have run their program. If that fails, `put` is not called, and the variables keep their values.
    """

    def values(self, replica: int = 0, changed: Iterable[int] = ()) -> Sequence[Leaf]:
        """Return the values with which a replica begins a program.

        Args:
            replica: Global index of the replica.
            changed: Numbers of the variables that the program changes; without them, shapes and dtypes are right.
        """

    @property
    def is_current(self) -> bool:
        """Whether these are still all variables; if not, the program is traced again."""

    @contextmanager
    def inside(self, values: Sequence[Leaf]) -> Iterator[Callable[[], Mapping[int, Leaf]]]:
        """Give the variables these values while the function is traced; yield a function that returns the changes."""

    def put(self, of_replicas: Sequence[Mapping[int, Leaf]]) -> None:
        """Assign the values that the local replicas have changed."""


class _Nothing:
    is_current = True

    def values(self, replica: int = 0, changed: Iterable[int] = ()) -> Sequence[Leaf]:
        return ()

    @contextmanager
    def inside(self, values: Sequence[Leaf]) -> Iterator[Callable[[], Mapping[int, Leaf]]]:
        yield dict

    def put(self, of_replicas: Sequence[Mapping[int, Leaf]]) -> None:
        pass


NOTHING_CAPTURED: CapturedVariables = _Nothing()
