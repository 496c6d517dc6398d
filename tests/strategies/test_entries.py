"""Entries of the journal: every value comes back as it was, and damaged entries give one error and take no memory."""

from __future__ import annotations

import enum
import itertools
import json
import os
import pickle
import struct
import subprocess
import sys
import tracemalloc
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from popdist.membership.standby import joined, separated
from strategies import Mean, SpareError
from strategies.core.journal import DEEPEST, Entry
from strategies.jax.replicas.sharding import TreeNodes
from strategies.trees import ShapeOfArray

NODES = TreeNodes()

Pair = namedtuple("Pair", "one other")  # noqa: PYI024 - a user's class may be such a one


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Largest:
    """A metric of a user's own class."""

    score: np.ndarray
    parts: np.ndarray


class Colour(enum.IntEnum):
    RED = 1


def nan_with(payload):
    return struct.unpack(">d", struct.pack(">Q", 0xFFF8000000000000 | payload))[0]


VALUES = {
    "none and bools": [None, True, False],
    "integers": [0, -1, 2**53 + 1, -(2**63), 2**200],
    "floats": [0.0, -0.0, 0.1, 5e-324, 1.7976931348623157e308],
    "floats that JSON lacks": [float("inf"), float("-inf"), float("nan"), nan_with(77)],
    "texts": ["", "loss/\N{GREEK SMALL LETTER ALPHA}\0\n", "\ud800", '["array"]'],
    "nested": [(), [], {}, ([(1,)], [[]]), {"list": ["tuple", {"a": (1.0, None)}]}],
    "keys": [{1: "one", "1": "text", (2, None): [3], 2.5: 0, False: 2}, {"b": 1, "a": 2}],
    "scalars of NumPy": [np.float32(0.1), np.float64(-0.0), np.int8(-3), np.uint64(2**64 - 1), np.bool_(True)],
    "narrow scalars": [ml_dtypes.bfloat16(1.5), np.float16("nan"), ml_dtypes.float8_e4m3fn(2), ml_dtypes.int4(-8)],
    "arrays": [np.arange(6.0).reshape(2, 3), np.array([], np.int32), np.zeros((0, 5, 2)), np.array([[True]])],
    "arrays without axes": [np.array(3), np.array(1.5, ml_dtypes.bfloat16), np.array(1j)],
    "arrays in other orders": [np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.arange(24.0).reshape(2, 3, 4).T],
    "narrow arrays": [np.arange(5).astype(ml_dtypes.bfloat16), np.float32([np.nan, -np.inf, -0.0])],
    "arrays of JAX": [jnp.arange(3), jnp.float32(2), jnp.ones((2, 0), jnp.bfloat16)],
    "shapes": [ShapeOfArray((2, 3), np.dtype(np.float32)), ShapeOfArray((), np.dtype(ml_dtypes.bfloat16))],
    "metrics": [{"loss": Mean(np.float64(3), np.array(2.0)), "top": Largest(np.float32(1), np.int32(4))}],
    "other nodes": [Pair(1, np.ones(2)), OrderedDict(b=1, a=[2]), {"pair": Pair(Pair(None, ()), {})}],
}


def facts_of(value):
    """Return the types and bits of a value, and the order of arrays in memory."""
    if isinstance(value, jax.Array):
        return jax.Array, facts_of(np.asarray(value))
    if isinstance(value, np.ndarray | np.generic):
        return type(value), value.dtype, value.shape, value.flags.fnc, value.tobytes()
    if isinstance(value, float):
        return float, struct.pack(">d", value)
    if isinstance(value, dict):
        return type(value), [facts_of(item) for item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [facts_of(part) for part in value]
    if isinstance(value, Mean | Largest):
        return type(value), facts_of(vars(value))
    return type(value), value


@pytest.mark.parametrize("name", VALUES)
def test_values_come_back_with_the_same_types_and_bits(name):
    for value in VALUES[name]:
        found = Entry.decode(Entry("step", 3, 1, value).encode(NODES), NODES)
        assert (found.kind, found.done, found.passes, found.obstacle) == ("step", 3, 1, "")
        assert facts_of(found.value) == facts_of(value)


def test_arrays_that_come_back_are_aligned_and_can_be_written():
    array = Entry.decode(Entry("step", 0, 0, np.zeros((2, 3))).encode(NODES), NODES).value
    assert array.flags.writeable
    assert array.flags.aligned
    array[0, 0] = 1


def test_a_part_of_a_larger_array_comes_back_alone():
    whole = np.arange(100_000.0)
    data = Entry("step", 0, 0, whole[::50_000]).encode(NODES)
    assert len(data) < 200
    assert Entry.decode(data, NODES).value.tolist() == [0, 50_000]


def nested(levels):
    return [nested(levels - 1)] if levels else 1


@dataclass
class Unregistered:
    number: int = 0


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (lambda: None, "builtins.function cannot be sent"),
        ({1, 2}, "builtins.set cannot be sent"),
        (b"bytes", "builtins.bytes cannot be sent"),
        (Colour.RED, "Colour cannot be sent"),
        (Unregistered(), "Unregistered cannot be sent"),
        (np.array([None]), "array of object cannot be sent"),
        (np.array(["text"]), "array of <U4 cannot be sent"),
        (np.array([1.0], ">f4"), "array of >f4 cannot be sent"),
        (np.ma.masked_array([1.0], [True]), "MaskedArray cannot be sent"),
        (jnp.asarray(1.0), "weakly typed"),
        (nested(DEEPEST + 1), "more than 64 levels"),
        pytest.param(10**5000, "digits", id="digits"),
    ],
)
def test_values_that_cannot_be_sent_are_named(value, why):
    with pytest.raises((TypeError, ValueError), match=why):
        Entry("step", 0, 0, [value]).encode(NODES)


def test_a_class_that_has_no_name_in_a_module_cannot_be_sent():
    @jax.tree_util.register_dataclass
    @dataclass(frozen=True)
    class Hidden:
        score: float

    with pytest.raises(TypeError, match=r"test_entries\..*<locals>.Hidden cannot be sent"):
        Entry("evaluation", 0, 0, Hidden(1.0)).encode(NODES)


# ---- entries of enemies


def entry_with(value, *arrays, head=None):
    """Return the bytes of an entry with any description."""
    return joined([json.dumps(head or ["step", 3, 1, "", value]).encode(), *arrays])


class Evil:
    def __reduce__(self):
        return os.abort, ()


ENEMIES = {
    "a pickle": pickle.dumps(("step", 3, 1, Evil(), "")),
    "nothing": b"",
    "no description": joined([b""]),
    "no JSON": joined([b"[1"]),
    "no UTF-8": joined([b'["\xff"]']),
    "another description": entry_with(None, head=["step", 3]),
    "an object": entry_with(None, head={"kind": "step"}),
    "a kind of another type": entry_with(None, head=[7, 3, 1, "", None]),
    "a number of another type": entry_with(None, head=["step", "3", 1, "", None]),
    "an obstacle of another type": entry_with(None, head=["step", 3, 1, None, None]),
    "a value without form": entry_with({"a": 1}),
    "an empty form": entry_with([]),
    "an unknown form": entry_with(["object", "os.abort"]),
    "a form that is no text": entry_with([["list"]]),
    "a wrong float": entry_with(["float", "zz"]),
    "a short float": entry_with(["float", "00"]),
    "an array without bytes": entry_with(["array", "float32", [2], False]),
    "an array with other bytes": entry_with(["array", "float32", [2], False], b"1234"),
    "an array of no use": entry_with(None, b"1234"),
    "an array with too many facts": entry_with(["array", "float32", [1], False, 1], b"1234"),
    "a huge array": entry_with(["array", "float32", [1 << 40, 1 << 40], False], b"1234"),
    "a huge array without elements": entry_with(["array", "float32", [1 << 62, 0], False], b""),
    "more elements than numbers count": entry_with(["array", "float32", [1 << 40, 1 << 40, 1 << 40], False], b""),
    "too many axes": entry_with(["array", "uint8", [1] * 100, False], b"1"),
    "a negative length": entry_with(["array", "float32", [-1, -1], False], b"1234"),
    "a length that is no integer": entry_with(["array", "float32", [1.0], False], b"1234"),
    "a length that is a bool": entry_with(["array", "float32", [True], False], b"1234"),
    "objects": entry_with(["array", "object", [1], False], bytes(8)),
    "objects in fields": entry_with(["array", "O,f4", [1], False], bytes(12)),
    "texts": entry_with(["array", "U1000000000", [1], False], bytes(4)),
    "a dtype of no name": entry_with(["array", "no such", [1], False], bytes(8)),
    "a dtype that is no text": entry_with(["array", ["float32"], [1], False], bytes(4)),
    "a shape that is none": entry_with(["node", "strategies.trees:ShapeOfArray", "text", None]),
    "a shape without a dtype": entry_with(["node", "strategies.trees:ShapeOfArray", ["list"]]),
    "an array of JAX that is a text": entry_with(["node", "jax:Array", "text"]),
    "an array of JAX of a huge number": entry_with(["node", "jax:Array", 1 << 70]),
    "an array of JAX with an order": entry_with(["node", "jax:Array", 1, "float32", ["list"]]),
    "a shape of a huge number": entry_with(["node", "strategies.trees:ShapeOfArray", 1 << 70, True]),
    "an array of JAX with arguments": entry_with(["node", "jax:Array", 1, "float32", 1, 1, 1]),
    "a key without a value": entry_with(["dict", "a"]),
    "a key that has no hash": entry_with(["dict", ["list"], 1]),
    "a node without a class": entry_with(["node"]),
    "a class that is no text": entry_with(["node", 7, None]),
    "an unknown class": entry_with(["node", "no.such:Class", None, 1]),
    "a function for a class": entry_with(["node", "os:abort", None]),
    "a class that is no node": entry_with(["node", "subprocess:Popen", None, "true"]),
    "a builtin class": entry_with(["node", "builtins:int", None, "7"]),
    "a node with too few parts": entry_with(["node", "strategies.jax.evaluation.mean:Mean", ["tuple"], 1.0]),
    "a node with too many parts": entry_with(["node", f"{__name__}:Pair", None, 1, 2, 3]),
    "a node with other facts": entry_with(["node", "strategies.jax.evaluation.mean:Mean", 7, 1.0, 2.0]),
    "deep lists": joined([b'["step",3,1,"",' + b'["list",' * 100 + b"1" + b"]" * 101]),
    "very deep lists": joined([b"[" * 200_000 + b"]" * 200_000]),
    "a number with too many digits": joined([b'["step",3,1,"",' + b"1" * 5000 + b"]"]),
    "a length beyond the end": (1 << 62).to_bytes(8, "little") + b"[]",
    "a length beyond all": b"\xff" * 8,
    "half a length": b"\1\0\0",
}


def refusal_of(data):
    """Return the error of a damaged entry, None for an intact one; check the memory that reading it takes."""
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    try:
        Entry.decode(data, NODES)
        error = None
    except SpareError as found:
        error = found
    _, peak = tracemalloc.get_traced_memory()
    assert peak - before < (1 << 20) + 32 * len(data)
    return error


@pytest.fixture
def traced():
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.parametrize("name", ENEMIES)
@pytest.mark.usefixtures("traced")
def test_entries_of_enemies_are_refused(name):
    error = refusal_of(ENEMIES[name])
    assert error is not None
    assert str(error).startswith("an entry of the journal is damaged: ")
    assert len(str(error)) < 2500
    assert str(error).isprintable()


@pytest.mark.usefixtures("traced")
def test_a_thousand_damaged_entries_give_one_error_each():
    generator = np.random.default_rng(54)
    intact = [Entry("step", 3, 1, value).encode(NODES) for value in itertools.chain(*VALUES.values())]
    refused = others = 0
    while refused < 1000:
        data = bytearray(intact[generator.integers(len(intact))])
        if generator.random() < 0.3:
            del data[generator.integers(len(data)) :]
        else:
            head = 8 + int.from_bytes(data[:8], "little")  # bytes of arrays may have any values
            for place in generator.integers(head, size=generator.integers(1, 4)):
                data[place] = generator.choice([*b'[]{}",:-019eE.\0\xff', generator.integers(256)])
        if refusal_of(bytes(data)) is None:
            others += 1
        else:
            refused += 1
    assert others < refused / 2  # another letter in a text, for example


def test_words_of_others_cannot_write_to_the_terminal():
    entry = Entry("step", 0, 0, None, "\x1b[2Jline\nline").encode(NODES)
    assert Entry.decode(entry, NODES).obstacle == "\\x1b[2Jline\\nline"


def test_parts_of_a_view_are_not_copied():
    data = joined([b"one", b"", b"two"])
    assert separated(data) == [b"one", b"", b"two"]
    assert all(part.obj is data for part in separated(memoryview(data)))


WITHOUT_JAX = """
import sys
from collections import OrderedDict, namedtuple
import numpy as np
import strategies.trees as trees
from strategies.core.journal import Entry
from strategies.jax.replicas.sharding import TreeNodes
from strategies.errors import SpareError

class Metric:
    def __init__(self, total, unit):
        self.total, self.unit = total, unit

Pair = namedtuple("Pair", "one other")
trees.register_dataclass(Metric, ["total"], ["unit"])
NODES = TreeNodes()
value = {"metric": Metric(np.float64(3), "m"), "pair": Pair(1, [2]), "ordered": OrderedDict(b=1)}
data = Entry("evaluation", 1, 2, value).encode(NODES)
found = Entry.decode(data, NODES).value
assert (found["metric"].total, found["metric"].unit, found["pair"]) == (3, "m", Pair(1, [2]))
assert type(found["ordered"]) is OrderedDict and found["ordered"] == {"b": 1}
try:
    Entry.decode(data.replace(b"__main__:Metric", b"subprocess:Popen"[:15]), NODES)
except SpareError as error:
    print(error)
try:
    Entry.decode(data.replace(b"__main__:Metric", b"builtins:object"), NODES)
except SpareError as error:
    print(error)
assert "jax" not in sys.modules
"""


def test_nodes_come_back_without_jax():
    done = subprocess.run([sys.executable, "-c", WITHOUT_JAX], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    no_name, no_node = done.stdout.splitlines()
    assert "this program has no class subprocess:Pope" in no_name
    assert "no object can be made from 1 parts: it is no class of nodes" in no_node
