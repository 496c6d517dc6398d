"""The attributes of a module, of which each replica has its own."""

from __future__ import annotations

import json
import reprlib
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from io import BytesIO
from itertools import chain
from numbers import Real
from operator import is_
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import NoReturn, TypeAlias, final

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from collectives import Communicator
from strategies.errors import SpareError, StrategyError
from strategies.torch.agreement import gather_bytes
from strategies.torch.tensors import HOST
from strategies.typing import Tree

_MISSING = object()
_KEY = "_attributes_of_replicas"
"""The attribute in which a module has its `Attributes`, which live as long as the module."""
_NOT_OF_REPLICAS = frozenset({*vars(torch.nn.Module()), _KEY}) - {"training"}
"""Attributes that hold parameters, buffers, submodules and hooks."""
_CONTAINERS = frozenset((list, dict, set, deque, OrderedDict, defaultdict, Counter))
_MOST_ELEMENTS = 1000
"""Containers that begin with more elements belong to the instance, not to a replica."""
_SHARED = (NoneType, int, complex, str, bytes, tuple, Enum, type, FunctionType, BuiltinFunctionType, torch.dtype)
"""Kinds of objects that a program may have in several places, as long as they are not made in a function."""
_Place: TypeAlias = tuple[int, str]
"""The number of a submodule, and the name of an attribute."""
_EXAMPLES: Tree = (np.zeros(0), np.float32(0))
_OF_NUMPY: list[Callable[..., Tree]] = [
    *(np.ndarray, np.dtype, *(one.__reduce__()[0] for one in _EXAMPLES)),
    *{type(np.dtype(kind)) for kind in np.typecodes["All"] if kind != "O"},
]
"""What loads scalars and arrays of NumPy."""


@final
class ReplicaValues:
    """The values that an attribute has in the replicas of an instance, where no replica runs.

    Every use but `clear` raises, and so does pickling: a checkpoint would have values that nobody can load.

    Args:
        name: The names of the module and the attribute.
        of_replicas: The value of each replica, by its global index.

    Attributes:
        of_replicas: These values.
    """

    def __init__(self, name: str, of_replicas: Mapping[int, Tree]) -> None:
        self._name, self.of_replicas = name, dict(of_replicas)

    def __repr__(self) -> str:
        """Return the values, as for the error."""
        return ", ".join(f"{_shown(one)} in replica {replica}" for replica, one in self.of_replicas.items())

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse attributes of the values; there are no special ones."""
        if name.startswith("__"):
            raise AttributeError(name)
        self._raise_no_value()

    def clear(self) -> None:
        """Empty the containers of all replicas."""
        for one in self.of_replicas.values():
            if not isinstance(one, _Contents):
                self._raise_no_value()
            one.elements.clear()

    def _raise_no_value(self, *others: object) -> NoReturn:
        raise StrategyError(
            f"{self._name} was assigned in a step and is {self!r}, so outside of steps it has no value; assign one, or "
            "return it as a metric (log it in the step with self.log, in Lightning), or start one instance per replica"
        )

    def __deepcopy__(self, known: object) -> ReplicaValues:
        """Return the object itself: callbacks copy modules."""
        return self


for _operator in (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "mod", "pow", "neg", "abs"),
    *("float", "int", "index", "bool", "round", "format", "str", "lt", "le", "gt", "ge", "eq", "ne", "hash", "reduce"),
    *("len", "iter", "getitem", "contains", "call"),
):
    setattr(ReplicaValues, f"__{_operator}__", ReplicaValues._raise_no_value)


@dataclass(frozen=True, eq=False)
class _Contents:
    """The elements of a list, dictionary, set or deque at one time."""

    holder: Tree
    elements: Tree

    def put(self) -> None:
        self.holder.clear()
        (self.holder.extend if isinstance(self.holder, list | deque) else self.holder.update)(self.elements)

    @property
    def are_there(self) -> bool:
        """Whether the container has the same elements now."""
        now, then = self.holder, self.elements
        if len(now) != len(then) or isinstance(now, set):
            return bool(now == then)
        return all(map(is_, now, then)) and (not isinstance(now, dict) or all(map(is_, now.values(), then.values())))


@dataclass
class _Assigned:
    """The values of one attribute.

    Attributes:
        left: The value when the last replica ended, or what is there between steps.
        of: The values of the replicas; `_MISSING` for no attribute.
        shown: The values of the replicas at the end of the last step, and what was left in their place.
    """

    left: Tree
    of: dict[int, Tree]
    shown: tuple[dict[int, Tree], Tree] = ({}, _MISSING)

    def follow(self, now: Tree) -> bool:
        """Give all replicas what the program has done to a container; return False if the attribute is another one."""
        left = self.left
        if isinstance(left, _Contents) and not left.are_there:
            for replica, one in self.of.items():
                self.of[replica] = _Contents(one.holder, _edited(one.elements, left.elements, left.holder))
            self.left = _Contents(left.holder, left.holder.copy())
        return now is self.held

    @property
    def held(self) -> Tree:
        """The object that the attribute has had after the last step."""
        return self.left.holder if isinstance(self.left, _Contents) else self.left


@dataclass(frozen=True)
class AttributeView:
    """The attributes of a module at one time.

    Attributes:
        attributes: The attributes of each submodule.
        contents: The elements of lists, dictionaries and other containers, by the module's number and the name.
        assigned: The values of the replicas.
        of_steps: As in `Attributes`.
    """

    attributes: Sequence[dict[str, Tree]]
    contents: Mapping[_Place, _Contents]
    assigned: Mapping[_Place, _Assigned]
    of_steps: Counter[_Place]


@final
class Attributes:
    """The attributes of a module and its submodules that steps assign, for each local replica.

        self.count += 1  # in forward: the number of this replica's passes

    Between steps, attributes have the values of the last local replica. Where those of local replicas differ, an
    attribute is `ReplicaValues` in two cases: if all are numbers (in submodules no tensors, which may be on a device);
    or if the last one is None, a string or the like, because the program could assign the same object unseen.

    A value that the program assigns holds for all replicas, except that of another attribute, of which each replica has
    its own: `m.before = m.now` keeps the value of each replica. Lists, dictionaries, sets and deques count by their
    elements: if replicas have different keys or lengths, the attribute is `ReplicaValues`. If not, single elements can
    be, and all replicas get the edits of the program. Other objects that a step changes in place belong to the
    instance, and those of TorchScript to the module.

    Args:
        module: The module, which is not kept alive.
        left_out: Attributes of a library, which the program does not assign.
        apart: Submodules of these classes are left alone.

    Attributes:
        of_steps: How many steps have assigned an attribute, by the id of its module's dictionary and its name.
    """

    def __init__(
        self, module: torch.nn.Module, left_out: Collection[str] = (), apart: tuple[type[torch.nn.Module], ...] = ()
    ) -> None:
        self._others = _NOT_OF_REPLICAS | frozenset(left_out)
        # When the module is freed, its parameters are: no cycle keeps the dictionaries until the next collection.
        self._module = weakref.proxy(module, lambda _: self._attributes.clear())
        self._apart: tuple[type[torch.nn.Module], ...] = (*apart, torch.jit.ScriptModule)
        self._attributes: list[dict[str, Tree]] = []
        self._replicas: Sequence[int] = ()
        self._small: set[_Place] = set()  # containers that have begun with few elements
        self.of_steps = Counter[_Place]()
        self._assigned: dict[_Place, _Assigned] = {}  # by the module's number and the attribute's name
        self._movable: set[int] = set()  # ids of their values, but those that another attribute has had, too
        self.follow()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Return None in place of a copy: the values are those of the module, and not of its copies."""
        return NoneType, ()

    def follow(self) -> None:
        """Find the submodules that the module has now. Those that it had before keep the values of replicas."""
        before, kind = self._attributes, self._module.__class__.__name__
        named = [(name, one) for name, one in self._module.named_modules() if not isinstance(one, self._apart)]
        self._attributes = [vars(one) for _, one in named]
        self._names = [f"{kind}.{name}" if name else kind for name, _ in named]
        places = {id(one): number for number, one in enumerate(self._attributes)}
        self._assigned = {
            (places[id(before[number])], name): values
            for (number, name), values in self._assigned.items()
            if id(before[number]) in places
        }

    # ---- all at once

    def view(self) -> AttributeView:
        """Return the present attributes of the module, and those of all replicas."""
        attributes = [dict(one) for one in self._attributes]
        return AttributeView(attributes, dict(self._contents()), _copies(self._assigned), self.of_steps.copy())

    def _changes(self, before: AttributeView) -> dict[_Place, Tree]:
        """Return the earlier value of each attribute that is another object now, or has other elements."""
        found: dict[_Place, Tree] = {}
        for number, (attributes, then) in enumerate(zip(self._attributes, before.attributes, strict=True)):
            if not _are_same(attributes, then):
                for name in (then.keys() | attributes.keys()) - self._others:
                    if attributes.get(name, _MISSING) is not (first := then.get(name, _MISSING)):
                        found[number, name] = before.contents.get((number, name), first)
        return found | {place: contents for place, contents in before.contents.items() if not contents.are_there}

    def put(self, view: AttributeView, *, of_all: bool = True) -> None:
        """Give the module the attributes that it had, and if `of_all`, all replicas too."""
        for (number, name), value in self._changes(view).items():
            _put(self._attributes[number], name, value)
        if of_all:
            self._assigned, self.of_steps = _copies(view.assigned), view.of_steps.copy()

    def note(self, before: AttributeView) -> AttributeView:
        """Note what steps have assigned since a view, and return the present one."""
        changed = self._changes(before)
        self.of_steps.update((id(self._attributes[number]), name) for number, name in changed)
        return self.view() if changed or self._assigned else before

    def undo(self, before: AttributeView, after: AttributeView) -> None:
        """Take back what replicas have assigned between two views, except where the program has assigned since."""
        of_program = self._changes(after)
        for (number, name), value in self._changes(before).items():
            if (number, name) not in of_program:
                _put(self._attributes[number], name, value)
        self._assigned, self.of_steps = _copies(before.assigned), before.of_steps.copy()

    def of_all(self, communicator: Communicator) -> Counter[_Place]:
        """Return `of_steps`, also with the attributes that steps have assigned on other instances only. Collective."""
        own = json.dumps(self._names_of_steps()).encode()
        for text in gather_bytes(communicator, own, "attributes that steps assign"):
            for number, name in json.loads(text):
                self.of_steps.setdefault((id(self._attributes[number]), name), 0)
        return self.of_steps

    def _names_of_steps(self) -> list[_Place]:
        places = {id(one): number for number, one in enumerate(self._attributes)}
        return sorted((places[of], name) for of, name in self.of_steps if of in places)

    def _value(self, number: int, name: str) -> Tree:
        return self._attributes[number].get(name, _MISSING)

    def _contents(self) -> Iterator[tuple[_Place, _Contents]]:
        for number, attributes in enumerate(self._attributes):
            for name, value in attributes.items():
                if type(value) not in _CONTAINERS or name in self._others:
                    continue
                if len(value) <= _MOST_ELEMENTS or (id(attributes), name) in self._small:
                    self._small.add((id(attributes), name))
                    yield (number, name), _Contents(value, value.copy())

    # ---- for an instance that joins

    def packed(self) -> bytes:
        """Return the attributes that steps have assigned, with the values of the first local replica, for `unpack`.

        What cannot be sent is left out if one step has assigned it: that is a cache, which the other instance fills.
        """
        names, found, gone, obstacle, module = self._names_of_steps(), [], [], "", self._module
        storages = {one.untyped_storage().data_ptr() for one in [*module.parameters(), *module.buffers()]}
        for number, name in names:
            if (value := self._of_first(number, name)) is _MISSING:
                gone.append((number, name))
                continue
            try:
                copy = tree_map_only(torch.Tensor, partial(_copied_apart, storages=storages), value)
                unpack_tree(pack_tree(copy))
            except Exception:  # pickle raises whatever an object raises
                if self.of_steps[id(self._attributes[number]), name] > 1:
                    obstacle = f"{self._names[number]}.{name}, a {type(value).__name__}"
            else:
                found.append((number, name, copy))
        return pack_tree((names, found, gone, obstacle))

    def _of_first(self, number: int, name: str) -> Tree:
        now, values = self._value(number, name), self._assigned.get((number, name))
        if values is not None and values.follow(now):
            now = values.of[min(values.of)]
        return now.elements if isinstance(now, _Contents) else now

    def unpack(self, packed: bytes) -> None:
        """Let all replicas begin with the attributes of another instance.

        Raises:
            SpareError: If one of them cannot be sent to another process.
        """
        names, found, gone, obstacle = unpack_tree(packed, next(self._module.parameters()).device)
        if obstacle:
            raise SpareError(
                f"this spare cannot take the place of a lost instance: steps assign {obstacle}, which cannot be sent; "
                "assign numbers, strings, tensors, or lists, sets and dictionaries of them"
            )
        self._assigned.clear()
        self.of_steps = Counter((id(self._attributes[number]), name) for number, name in names)
        for number, name in gone:
            _put(self._attributes[number], name, _MISSING)
        for number, name, value in found:
            attributes = self._attributes[number]
            now = attributes.get(name, _MISSING)
            _put(attributes, name, _Contents(now, value) if type(now) is type(value) in _CONTAINERS else value)

    # ---- for one replica

    def begin(self, replicas: Iterable[int]) -> bool:
        """Begin a step of these local replicas, and return whether they need `of`. New ones begin as another one does.

        A value that the program has assigned since the last step holds for all replicas. If the program has moved the
        value of another attribute, each replica moves its own.
        """
        local = self._replicas = list(replicas)
        before = self._assigned
        self._assigned = {key: one for key, one in before.items() if one.follow(self._value(*key))}
        moved = {id(one.held): one for one in before.values() if id(one.held) in self._movable}
        for number, attributes in enumerate(self._attributes if moved else ()):
            for name, now in [pair for pair in attributes.items() if id(pair[1]) in moved]:
                self._assigned.setdefault((number, name), replace(moved[id(now)], shown=({}, _MISSING)))
        for values in self._assigned.values():
            other = next(iter(values.of.values()))
            values.of = {replica: values.of.get(replica, other) for replica in local}
        return len(local) > 1 or bool(self._assigned)

    @contextmanager
    def of(self, replica: int) -> Iterator[None]:
        """Give attributes the values of a replica, and keep those that it assigns."""
        for (number, name), values in self._assigned.items():
            _put(self._attributes[number], name, values.of[replica])
        before = self.view()
        try:
            yield
        finally:
            self._end(replica, before)

    def _end(self, replica: int, before: AttributeView) -> None:
        for place, first in self._changes(before).items():  # replicas that have not assigned it have the first value
            self._assigned.setdefault(place, _Assigned(first, dict.fromkeys(self._replicas, first)))
        for (number, name), values in self._assigned.items():
            now, then = self._value(number, name), values.of.get(replica)
            if type(now) in _CONTAINERS:
                is_same = isinstance(then, _Contents) and then.holder is now and then.are_there
                now = then if is_same else _Contents(now, now.copy())
            values.of[replica] = values.left = now

    def end(self) -> None:
        """End a step of all local replicas: leave `ReplicaValues` where no value would do for all."""
        for (number, name), values in self._assigned.items():
            of = values.of
            if not _are_same(values.shown[0], of):
                is_of_device = number and isinstance(values.left, torch.Tensor)
                are_numbers = not is_of_device and all(map(_is_number, of.values()))
                values.shown = dict(of), _outside(f"{self._names[number]}.{name}", of, values.left, are_numbers)
            values.left = values.shown[1]
            _put(self._attributes[number], name, values.left)
        held = Counter(id(one.held) for one in self._assigned.values() if not isinstance(one.held, _SHARED))
        every = Counter(map(id, chain.from_iterable(map(dict.values, self._attributes if held else ()))))
        self._movable = {number for number, count in held.items() if every[number] == count}

    def show(self) -> None:
        """Give attributes the values of the last local replica in place of `ReplicaValues`, when no step follows."""
        for (number, name), values in self._assigned.items():
            if values.follow(self._value(number, name)):
                values.left = values.of[max(values.of)]
                _put(self._attributes[number], name, values.left)


def attributes_of(module: torch.nn.Module) -> Attributes:
    """Return the attributes of a module, which all trainings and evaluations of the module share."""
    found: Attributes = vars(module).get(_KEY) or Attributes(module)
    vars(module)[_KEY] = found
    return found


def _copies(assigned: Mapping[_Place, _Assigned]) -> dict[_Place, _Assigned]:
    return {place: replace(one, of=dict(one.of)) for place, one in assigned.items()}


def _outside(name: str, of: Mapping[int, Tree], left: Tree, is_refused: bool = False) -> Tree:
    """Return what the program sees outside of steps, given the values of the replicas and the one that is left."""
    elements = {replica: _keyed(one.elements) for replica, one in of.items() if isinstance(one, _Contents)}
    if len(elements) == len(of) and all(one.keys() == _keyed(left.elements).keys() for one in elements.values()):
        shown = left.elements.copy()
        for key, one in {} if isinstance(shown, set) else _keyed(left.elements).items():
            shown[key] = _outside(f"{name}[{key!r}]", {replica: each[key] for replica, each in elements.items()}, one)
        return _Contents(left.holder, shown)
    if (is_refused or _is_shared(left)) and not all(_are_equal(left, one) for one in of.values()):
        return ReplicaValues(name, of)
    return left * 1.0 if type(left) is float else left  # an object that the program does not have


def _edited(own: Tree, left: Tree, now: Tree) -> Tree:
    """Return a replica's elements after the edits that have made `now` of `left`, which has the same keys."""
    found, before, of_replica = now.copy(), _keyed(left), _keyed(own)
    places = {id(one): key for key, one in before.items()}
    for key, one in {} if isinstance(now, set) else _keyed(now).items():
        place = key if before.get(key, _MISSING) is one else places.get(id(one), _MISSING)
        found[key] = of_replica.get(place, one)
    return found


def _keyed(elements: Tree) -> Mapping[Tree, Tree]:
    """Return the elements of a container by their keys or places."""
    if isinstance(elements, dict):
        return elements
    return dict.fromkeys(elements) if isinstance(elements, set) else dict(enumerate(elements))


def _copied_apart(tensor: torch.Tensor, storages: Set[int]) -> torch.Tensor:
    """Return a copy of a tensor, which is no view of these storages."""
    if tensor.untyped_storage().data_ptr() in storages:
        raise ValueError("a view of a parameter or buffer would be none in another process")
    return tensor.detach().clone()


def pack_tree(value: Tree) -> bytes:
    """Return a tree of tensors, numbers and strings as bytes, for `unpack_tree`."""
    file = BytesIO()
    torch.save(value, file)
    return file.getvalue()


def unpack_tree(packed: bytes, device: torch.device | None = None) -> Tree:
    """Return a value with its tensors of the host there, and others on a device; no code that comes with it runs."""
    place = None if device is None else lambda storage, of: storage if of == HOST.type else storage.to(device=device)
    with torch.serialization.safe_globals([*_OF_NUMPY]):
        return torch.load(BytesIO(packed), map_location=place, weights_only=True)


def _put(attributes: dict[str, Tree], name: str, value: Tree) -> None:
    if value is _MISSING:
        attributes.pop(name, None)
    elif isinstance(value, _Contents):
        attributes[name] = value.holder
        value.put()
    else:
        attributes[name] = value


def _are_same(now: Mapping[Tree, Tree], before: Mapping[Tree, Tree]) -> bool:
    """Return whether two dictionaries have the same keys and objects in the same order, which takes 1 us."""
    return now.keys() == before.keys() and all(map(is_, now.values(), before.values()))


def _are_equal(one: Tree, other: Tree) -> bool:
    """Return whether two values of an attribute are equal."""
    try:
        return one is other or bool(one == other) or bool(one != one and other != other)  # NaN
    except Exception:  # arrays of several elements, and classes of the program
        return False


def _is_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex() and value.device.type != "meta"
    if isinstance(value, np.ndarray):
        return value.size == 1 and value.dtype.kind in "biuf"
    return isinstance(value, Real | np.bool_)


def _shown(value: Tree) -> str:
    if isinstance(value, torch.Tensor):
        value = value.detach()
    if isinstance(value, torch.Tensor | np.ndarray | np.generic) and _is_number(value):
        value = value.item()
    value = value.elements if isinstance(value, _Contents) else value
    return f"{value:g}" if isinstance(value, float) else "nothing" if value is _MISSING else reprlib.repr(value)


def _is_shared(value: Tree) -> bool:
    """Return whether a program may have this very object in several places, as it has None."""
    if value is _MISSING or isinstance(value, _Contents):  # `clear` or `add` may change nothing
        return True
    return isinstance(value, _SHARED) and "<" not in getattr(value, "__qualname__", "")
