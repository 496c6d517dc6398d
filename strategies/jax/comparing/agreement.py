"""The terms of a training, and digests of pytrees, which instances compare before a step.

A traced program is compared as lines of text that are equal whenever the same code was traced. JAX prints programs too,
but it leaves out the values of arrays that they close over, and prints addresses of functions.
"""

from __future__ import annotations

import enum
import hashlib
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

import strategies.trees as trees
from strategies.core.agreement import Digest, Terms, digest_of_arrays
from strategies.data.datasets import DistributedDataset
from strategies.jax.programs.compilation import shapes_by_name
from strategies.jax.programs.jaxpr import needed
from strategies.jax.replicas.devices import borrow, is_key
from strategies.late_jax import is_jax_array, jax
from strategies.late_jax import jax_core as core
from strategies.typing import Batch, Leaf, OptimizerState, Tree, Variables


def host_arrays(tree: Tree) -> dict[str, np.ndarray]:
    """Return the arrays of a tree on the host by their paths, on CPUs without a copy. Random keys become numbers."""
    return {
        trees.keystr(path): borrow(jax.random.key_data(leaf) if is_key(leaf) else leaf)
        for path, leaf in trees.leaves_with_path(tree)
    }


def digest_of(tree: Tree) -> Digest:
    """Return `digest_of_arrays` of the arrays of a tree, which may be random keys."""
    return digest_of_arrays(host_arrays(tree).values())


def flip_bit(variables: Variables) -> Tree:
    """Return the variables with one bit flipped in the middle of one number, for planted faults."""
    leaves, structure = trees.flatten(variables)
    changed = np.array(leaves[0])
    changed.reshape(-1).view(np.uint8)[changed.itemsize // 2] ^= 1
    return trees.unflatten(structure, [jax.device_put(changed, next(iter(leaves[0].devices()))), *leaves[1:]])


def fingerprint(variables: Variables) -> str:
    """Return the SHA-256 of the bits of all leaves, in tree order, as 64 hexadecimal digits.

    Args:
        variables: Pytree of arrays, or of tensors of PyTorch on any device.
    """
    digest = hashlib.sha256()
    for leaf in trees.leaves(variables):
        digest.update(_bytes_of(leaf))
    return digest.hexdigest()


def _bytes_of(leaf: Tree) -> bytes:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(leaf, torch.Tensor):  # NumPy converts no bfloat16, and nothing on a device
        on_host = leaf.detach().cpu().resolve_conj().resolve_neg()
        return bytes(on_host.reshape(-1).view(torch.uint8).numpy())
    return np.asarray(leaf).tobytes()


_FEW = 4  # elements of an array that are shown; a larger array is shown as a digest
_PLAIN = (bool, int, float, complex, str, bytes, np.dtype, np.generic, enum.Enum, type(None))


def terms_of(
    options: Mapping[str, Any],
    dataset: DistributedDataset | None,
    batch: Batch,
    programs: Mapping[str, Sequence[str]],
    optimizer_state: OptimizerState,
) -> Terms:
    """Return the terms that decide the result of a training.

    Args:
        options: Options by their names.
        dataset: Data set that gave the batch, or None.
        batch: Shapes and dtypes of one replica's batch.
        programs: Lines of the programs, by the programs' names.
        optimizer_state: Optimizer state, whose scalars are compared.
    """
    position = {} if dataset is None else dataset.position().to_dict()
    arguments = {**options, **{f"data set {name}": value for name, value in position.items()}}
    return [
        {name: str(value) for name, value in arguments.items()},
        {f"batch{name} for each replica": shape for name, shape in shapes_by_name(batch).items()},
        programs,
        {f"optimizer state {name}": value for name, value in scalars_by_name(optimizer_state).items()},
    ]


def digest_of_programs(
    options: Mapping[str, object], batch: Batch, programs: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    """Return a digest of what an instance that joins must have in common with the others, by the shapes of the batch.

    Args:
        options: Options by their names.
        batch: Shapes and dtypes of one replica's batch.
        programs: Lines of the programs, by the programs' names.
    """
    shapes = ", ".join(f"{name} {shape}" for name, shape in shapes_by_name(batch).items())
    text = json.dumps([{name: str(value) for name, value in options.items()}, programs])
    return {f"digest of the programs for batch{shapes}": hashlib.sha256(text.encode()).hexdigest()[:16]}


def lines_of(closed: core.ClosedJaxpr) -> list[str]:
    """Return one line for each equation on which results of the program depend, with all numbers in it.

    Details that decide no result are left out: printing, names of variables, places in files, and devices. A function
    that is called later appears by name only. A nested program is written once, before the program that contains it.

    Args:
        closed: Result of `jax.make_jaxpr`.
    """
    writer = _Writer()
    writer.write(closed.jaxpr, closed.consts)
    return writer.lines


def scalars_by_name(tree: Tree) -> dict[str, str]:
    """Return the values of all scalars of a tree, by their paths; without random keys.

    An array of one element is no scalar: with sharded state it may be a part, which differs between instances.
    """
    leaves = [(path, leaf) for path, leaf in trees.leaves_with_path(tree) if not is_key(leaf)]
    return {trees.keystr(path): text_of_array(leaf) for path, leaf in leaves if np.ndim(leaf) == 0}


class _Writer:
    """A writer of programs; it writes a program before the programs that call it.

    Attributes:
        lines: Lines written so far.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._names: dict[tuple[str, ...], str] = {}  # names of the programs written so far
        self._known: dict[int, tuple[Any, str]] = {}  # by id; the value keeps the program alive, so the id stays unique

    def write(self, jaxpr: Any, constants: Sequence[Any]) -> str:
        """Write a program unless it was written before; return the name by which others call it."""
        if not constants and id(jaxpr) in self._known:
            return self._known[id(jaxpr)][1]
        lines = tuple(self._program(jaxpr, constants))
        if lines not in self._names:
            self._names[lines] = f"program{len(self._names)}"
            self.lines += [f"{self._names[lines]}:", *lines]
        if not constants:
            self._known[id(jaxpr)] = jaxpr, self._names[lines]
        return self._names[lines]

    def _program(self, jaxpr: Any, constants: Sequence[Any]) -> Iterator[str]:
        numbers = itertools.count()
        names: dict[Any, str] = {}

        def define(variable: Any) -> str:
            names[variable] = f"v{next(numbers)}"
            return f"{names[variable]}:{_type(variable.aval)}"

        def read(atom: Any) -> str:
            return text_of_array(atom.val) if isinstance(atom, core.Literal) else names[atom]

        for variable, value in itertools.zip_longest(jaxpr.constvars, constants):
            yield f"{define(variable)} = {'a constant' if value is None else text_of_array(value)}"
        yield f"takes {', '.join(map(define, jaxpr.invars))}"
        for equation in needed(jaxpr):
            given = " ".join(map(read, equation.invars))
            results = ", ".join(map(define, equation.outvars))
            yield f"{results} = {equation.primitive}{self._parameters(equation.params)} {given}"
        yield f"returns {', '.join(map(read, jaxpr.outvars))}"

    def _parameters(self, parameters: Mapping[str, Any]) -> str:
        shown = [f"{name}={self._value(value)}" for name, value in sorted(parameters.items())]
        return f"[{' '.join(shown)}]" if shown else ""

    def _value(self, value: object) -> str:
        if isinstance(value, core.ClosedJaxpr):
            return self.write(value.jaxpr, value.consts)
        if isinstance(value, core.Jaxpr):
            return self.write(value, ())
        if isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, Mapping):
            return f"{{{', '.join(sorted(f'{key}: {self._value(each)}' for key, each in value.items()))}}}"
        if isinstance(value, tuple | list):
            return f"({', '.join(map(self._value, value))})"
        if isinstance(value, set | frozenset):
            return f"{{{', '.join(sorted(map(self._value, value)))}}}"
        if isinstance(value, np.ndarray) or is_jax_array(value):
            return text_of_array(value)
        return str(getattr(value, "__qualname__", type(value).__qualname__))


def _type(aval: Any) -> str:
    return f"{aval.dtype}{list(aval.shape)}" if hasattr(aval, "shape") else type(aval).__qualname__


def text_of_array(value: Leaf) -> str:
    """Return the values of a small array, or a digest of a larger one."""
    if is_key(value):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    if not array.ndim:
        return str(array)
    shown = array.tolist() if array.size <= _FEW else "digest {:016x}{:016x}".format(*digest_of(array))
    return f"{array.dtype}{list(array.shape)} {shown}"
