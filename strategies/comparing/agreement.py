"""The agreement of all instances before a step, and the message that names who differs.

What a traced program computes is compared as lines of text that are the same wherever the same code was traced. JAX
prints programs too, but not the values of arrays that they close over, and it prints addresses of functions.
"""

from __future__ import annotations

import enum
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from collectives import Communicator
from strategies.comparing.digest import digest_of
from strategies.data.datasets import DistributedDataset
from strategies.errors import DisagreementError
from strategies.programs.compilation import shapes_by_name
from strategies.programs.jaxpr import needed
from strategies.replicas.devices import is_key
from strategies.replicas.replicas import Replicas
from strategies.typing import Batch, Leaf, OptimizerState, Tree

Terms = Sequence[Mapping[str, str | Sequence[str]]]
"""What decides the result, by name: a value, or the lines of a program. In several groups: what is in a later one may
differ because something in an earlier one does."""
_MOST = 4  # differences that are named
_PROGRAM = "; start all with the same program and arguments"
_ARGUMENTS = "; start all with the same arguments"

_FEW = 4  # elements of an array that are shown; of larger ones only a digest
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
        options: by their names.
        dataset: the one that has given the batch; None if none has.
        batch: the shapes and dtypes of what one replica takes.
        programs: the lines of what is computed, by their names.
        optimizer_state: of which scalars are compared.
    """
    position = {} if dataset is None else dataset.position().to_dict()
    arguments = {**options, **{f"data set {name}": value for name, value in position.items()}}
    return [
        {name: str(value) for name, value in arguments.items()},
        {f"batch{name} for each replica": shape for name, shape in shapes_by_name(batch).items()},
        programs,
        {f"optimizer state {name}": value for name, value in scalars_by_name(optimizer_state).items()},
    ]


def insist_on_agreement(
    replicas: Replicas, terms: Terms, name: str = "digests of options and programs", way_out: str = _ARGUMENTS
) -> None:
    """Compare what decides the result with that of all other instances; a collective call.

    Instances exchange 32 bytes each where they agree, and everything where they do not.

    Args:
        replicas: connects the instances.
        terms: of this instance.
        name: of the call, for messages.
        way_out: at the end of a message about values.

    Raises:
        DisagreementError: on all instances, with the same text, if they do not agree.
    """
    communicator = replicas.communicator
    if communicator.size == 1:
        return
    text = json.dumps([dict(group) for group in terms])
    mine = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    digests = communicator.all_gather(mine, name=name)
    if (digests == digests[0]).all():
        return
    what = "what an instance was started with"
    told = [json.loads(broadcast_text(communicator, text, root, what)) for root in range(communicator.size)]
    numbers = communicator.all_gather(np.array(replicas.first_index, np.int64), name="numbers of instances")
    raise DisagreementError(describe(dict(zip(numbers.tolist(), told, strict=True)), way_out))


def broadcast_text(communicator: Communicator, text: str, root: int, name: str) -> str:
    """The text that rank `root` has, on all ranks; a collective call.

    Args:
        communicator: connects the ranks.
        text: of this rank.
        root: whose text is wanted.
        name: of the text, for messages.
    """
    data = np.frombuffer(text.encode(), np.uint8).copy()
    size = communicator.broadcast(np.array([data.size], np.int64), root, name=f"size of {name}")
    data = data if communicator.rank == root else np.empty(size[0], np.uint8)
    return communicator.broadcast(data, root, name=name).tobytes().decode()


def describe(told: Mapping[int, Terms], way_out: str = _ARGUMENTS) -> str:
    """Return which instances differ, and in what.

    Args:
        told: the terms of each instance, by its number; not all are the same.
        way_out: at the end of a message about values.
    """
    for groups in zip(*told.values(), strict=True):
        of_instances = dict(zip(told, groups, strict=True))
        names = dict.fromkeys(name for group in groups for name in group)
        different = [name for name in names if len({str(group.get(name)) for group in groups}) > 1]
        values = {name: {instance: of[name] for instance, of in of_instances.items() if name in of} for name in names}
        programs = [name for name in different if any(isinstance(value, list) for value in values[name].values())]
        if programs:
            return _of_program(programs[0], {each: list(lines) for each, lines in values[programs[0]].items()})
        if different:
            shown = "; ".join(_of_value(name, values[name], list(told)) for name in different[:_MOST])
            more = len(different) - _MOST
            return shown + (f"; and {more} more" if more > 0 else "") + way_out
    raise ValueError("all instances agree")


def _of_value(name: str, values: Mapping[int, str | Sequence[str]], instances: Sequence[int]) -> str:
    """For example: instance 1 has seed 3, instances 0 and 2 seed 4."""
    having: dict[str, list[int]] = {}
    for instance in instances:
        having.setdefault(f"{name} {values[instance]}" if instance in values else f"no {name}", []).append(instance)
    fewest_first = sorted(having.items(), key=lambda item: (len(item[1]), -item[1][0]))
    (what, who), *others = fewest_first
    verb = "has" if len(who) == 1 else "have"
    return ", ".join([f"{_named(who)} {verb} {what}", *(f"{_named(whose)} {other}" for other, whose in others)])


def _of_program(name: str, programs: Mapping[int, Sequence[str]]) -> str:
    """The first line in which the programs of two instances differ."""
    (first, wanted), *others = programs.items()
    instance, lines = next((each, found) for each, found in others if found != wanted)
    pairs = enumerate(itertools.zip_longest(lines, wanted, fillvalue="nothing"), 1)
    number, (here, there) = next((number, pair) for number, pair in pairs if pair[0] != pair[1])
    return (
        f"instance {instance} computes {name} otherwise than instance {first}: line {number} of its program is "
        f"'{here}', and there '{there}'{_PROGRAM}"
    )


def _named(instances: Sequence[int]) -> str:
    if len(instances) == 1:
        return f"instance {instances[0]}"
    return f"instances {', '.join(map(str, instances[:-1]))} and {instances[-1]}"


def lines_of(closed: core.ClosedJaxpr) -> list[str]:
    """One line for each equation on which results of the program depend, with all numbers in it.

    What decides no result is left out: what only prints, names of variables, places in files, devices, and all of a
    function that is called later but its name. Programs within the program come before it, each of them once.

    Args:
        closed: what `jax.make_jaxpr` returns.
    """
    writer = _Writer()
    writer.write(closed.jaxpr, closed.consts)
    return writer.lines


def scalars_by_name(tree: Tree) -> dict[str, str]:
    """The values of all scalars of a tree, by their paths; without random keys."""
    leaves = [(path, leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree) if not is_key(leaf)]
    return {jax.tree_util.keystr(path): text_of_array(leaf) for path, leaf in leaves if np.size(leaf) == 1}


class _Writer:
    """Writes programs, those that are called by others first.

    Attributes:
        lines: what is written.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._names: dict[tuple[str, ...], str] = {}  # of the programs that were written
        self._known: dict[int, tuple[Any, str]] = {}  # by the id of a program without constants, which is kept alive

    def write(self, jaxpr: Any, constants: Sequence[Any]) -> str:
        """Write a program that has not been written yet; the name by which others call it."""
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
        if isinstance(value, np.ndarray | jax.Array):
            return text_of_array(value)
        return str(getattr(value, "__qualname__", type(value).__qualname__))


def _type(aval: Any) -> str:
    return f"{aval.dtype}{list(aval.shape)}" if hasattr(aval, "shape") else type(aval).__qualname__


def text_of_array(value: Leaf) -> str:
    """The values of a small array, a digest of a larger one."""
    if is_key(value):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    if not array.ndim:
        return str(array)
    shown = array.tolist() if array.size <= _FEW else "digest {:016x}{:016x}".format(*digest_of(array))
    return f"{array.dtype}{list(array.shape)} {shown}"
