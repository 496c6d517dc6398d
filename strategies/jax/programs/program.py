"""Programs compiled for a single device, independent of what runs beside them.

The last bits of results depend on the way in which XLA compiles a program. XLA compiles a program for several devices
differently from one for a single device (it merges common expressions earlier). On CPUs it divides a program among the
cores that the process may use at compilation. So programs of replicas and updates are never compiled for more than one
device, and always as if there were one core. Inside of large operations, the division of work depends only on the size
of XLA's thread pool, which is fixed (see `popdist.xla`).

The module also has the interface of variables that a function holds (`HeldState`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from strategies.jax.programs.compilation import compile_in_turn
from strategies.late_jax import jax
from strategies.late_jax import jax_core as core
from strategies.typing import Function, Leaf, Tree

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
                found = self._compiled[device, key] = compile_in_turn(lowered, self._executables)
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


def _settings() -> Hashable:
    """Return the settings of JAX in this thread that decide how a function is traced."""
    config: Any = jax.config
    return (
        config.jax_enable_x64,
        config.jax_default_matmul_precision,
        config.jax_numpy_dtype_promotion,
        config.jax_default_prng_impl,
        config.jax_threefry_partitionable,
        config.jax_debug_nans,
    )


# ---- variables beside arguments and results


class HeldState(Protocol):
    """Variables that a function reads, such as those of Keras models; they become arguments and results of its program.

    `strategy.run` reads `values`, traces a new function in `inside`, and calls `put` after all local replicas have run
    their program. If that fails, `put` is not called, and the variables keep their values.
    """

    @property
    def values(self) -> Sequence[Leaf]:
        """The values of all variables, for a program."""

    @property
    def is_current(self) -> bool:
        """Whether these are still all variables; if not, the program is traced again."""

    @contextmanager
    def inside(self, values: Sequence[Leaf]) -> Iterator[Callable[[], Mapping[int, Leaf]]]:
        """Give the variables these values while the function is traced; yield a function that returns the changes."""

    def put(self, of_replicas: Sequence[Mapping[int, Leaf]]) -> None:
        """Assign the values that the local replicas have changed."""


class _Nothing:
    values: Sequence[Leaf] = ()
    is_current = True

    @contextmanager
    def inside(self, values: Sequence[Leaf]) -> Iterator[Callable[[], Mapping[int, Leaf]]]:
        yield dict

    def put(self, of_replicas: Sequence[Mapping[int, Leaf]]) -> None:
        pass


NOTHING_HELD: HeldState = _Nothing()
