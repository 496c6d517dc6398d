"""A traced function cut into programs that run one after another, so that early results leave while later ones compute.

A gradient is finished as soon as its own equations are: what else the backward pass computes is no concern of it. So
each segment takes exactly the equations that its results need and no earlier segment has evaluated; what a later
segment reads of an earlier one is handed on as a residual. Arithmetic is not changed, only where programs begin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.extend import core
from jax.extend.core.primitives import dot_general_p, slice_p, transpose_p

Variable: Any = core.Var  # whose `aval` has a shape here, which JAX's types do not say
Equation: Any = core.JaxprEqn

_REPEATED = frozenset({"broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "iota"})
"""Movements of data: evaluated again where they are needed, which is cheaper than to hand on what they return."""
_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call"})


@dataclass(frozen=True)
class Part:
    """A result of the function, or some of its rows.

    Attributes:
        result: its position among the results.
        rows: the first of them and the one behind the last; None for all of them.
    """

    result: int
    rows: tuple[int, int] | None = None


@dataclass(frozen=True)
class Segment:
    """A program: `function(*inputs, *residuals) -> (*parts, *residuals)`.

    Attributes:
        function: evaluates its equations; traceable.
        inputs: which of the flat arguments it reads.
        takes: the numbers of the residuals that it reads.
        gives: the numbers of those that it hands on.
        parts: what it finishes.
    """

    function: Callable[..., Sequence[jax.Array]]
    inputs: tuple[int, ...]
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    parts: tuple[Part, ...]


def cut(closed: core.ClosedJaxpr, early: Sequence[int], bucket_bytes: int, piece_bytes: int) -> list[Segment]:
    """Cut a function at some of its results, in the order in which they can be finished.

    Args:
        closed: the traced function, without effects.
        early: the positions of the results to be finished early; all the others come with the last segment.
        bucket_bytes: results are finished together until they have so many bytes.
        piece_bytes: the last of the large ones, if it is the product of two matrices, is finished in pieces of at
            least so many bytes: nothing is left to be computed while it travels. (The others are not, because it
            takes longer to compute a product in pieces: a fifth, for three of them.)
    """
    graph = Graph.of(closed)
    ordered = sorted(early, key=lambda number: graph.place(graph.results[number]))
    large = [number for number in ordered if graph.nbytes(graph.results[number]) >= 2 * piece_bytes]
    parts = [
        part
        for number in ordered
        for part in (graph.divide(number, piece_bytes) if number in large[-1:] else [Part(number)])
    ]
    buckets = _fill(parts, [graph.nbytes(graph.variables[part]) for part in parts], bucket_bytes)
    late = [Part(number) for number in range(len(graph.results)) if number not in set(early)]
    buckets[-1] += late
    return _segments(graph, buckets)


def _fill(parts: Sequence[Part], sizes: Sequence[int], bucket_bytes: int) -> list[list[Part]]:
    """Put parts into buckets of at least `bucket_bytes`, without changing their order."""
    buckets: list[list[Part]] = [[]]
    filled = 0
    left = sum(sizes)
    for part, size in zip(parts, sizes, strict=True):
        buckets[-1].append(part)
        filled += size
        left -= size
        if filled >= bucket_bytes and left >= bucket_bytes:
            buckets.append([])
            filled = 0
    return buckets


class Graph:
    """The equations of a function with nested calls dissolved, and where each variable comes from."""

    def __init__(
        self, closed: core.ClosedJaxpr, arguments: list[Variable], constants: dict[Variable, Any], results: list[Any]
    ) -> None:
        self.closed = closed
        self.arguments = arguments
        self.constants = constants
        self.results = results
        self.equations: list[Equation] = []
        self.variables: dict[Part, Any] = {Part(number): atom for number, atom in enumerate(results)}
        self.producers: dict[Variable, int] = {}

    @classmethod
    def of(cls, closed: core.ClosedJaxpr) -> Graph:
        """The graph of a traced function."""
        jaxpr = closed.jaxpr
        graph = cls(closed, [Variable(var.aval) for var in jaxpr.invars], {}, [])
        names: dict[Any, Any] = dict(zip(jaxpr.invars, graph.arguments, strict=True))
        names |= graph._constants(jaxpr.constvars, closed.consts)
        graph.results = graph._inline(jaxpr, names)
        graph.variables = {Part(number): atom for number, atom in enumerate(graph.results)}
        return graph

    def _constants(self, variables: Iterable[Variable], values: Iterable[Any]) -> dict[Any, Any]:
        names = {}
        for variable, value in zip(variables, values, strict=True):
            names[variable] = Variable(variable.aval)
            self.constants[names[variable]] = value
        return names

    def _inline(self, jaxpr: core.Jaxpr, names: dict[Any, Any]) -> list[Any]:
        """Take over the equations of a jaxpr under new names; the names of its results."""
        for equation in jaxpr.eqns:
            values = [_renamed(atom, names) for atom in equation.invars]
            if equation.primitive.name in _CALLS:
                inner: Any = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
                body = inner if isinstance(inner, core.ClosedJaxpr) else core.ClosedJaxpr(inner, ())
                inside = dict(zip(body.jaxpr.invars, values, strict=True))
                inside |= self._constants(body.jaxpr.constvars, body.consts)
                names.update(zip(equation.outvars, self._inline(body.jaxpr, inside), strict=True))
            else:
                fresh = [Variable(var.aval) for var in equation.outvars]
                names.update(zip(equation.outvars, fresh, strict=True))
                self.add(equation.replace(invars=values, outvars=fresh))
        return [_renamed(atom, names) for atom in jaxpr.outvars]

    def add(self, equation: Equation) -> None:
        """Append an equation."""
        self.producers.update(dict.fromkeys(equation.outvars, len(self.equations)))
        self.equations.append(equation)

    def place(self, atom: Any) -> int:
        """After how many equations a value is there."""
        return -1 if isinstance(atom, core.Literal) else self.producers.get(atom, -1)

    @staticmethod
    def nbytes(atom: Any) -> int:
        """The size of a value."""
        return int(math.prod(atom.aval.shape) * getattr(atom.aval.dtype, "itemsize", 4))

    def ancestors(self, atoms: Iterable[Any], known: set[int]) -> set[int]:
        """The equations behind some values that are not known yet."""
        found: set[int] = set()
        stack = list(atoms)
        while stack:
            number = self.place(stack.pop())
            if number >= 0 and number not in found and number not in known:
                found.add(number)
                stack += self.equations[number].invars
        return found

    def is_repeated(self, number: int) -> bool:
        """Whether an equation only moves data."""
        return self.equations[number].primitive.name in _REPEATED

    # ---- products in pieces

    def divide(self, result: int, piece_bytes: int) -> list[Part]:
        """Cut a result that is the product of two matrices into pieces of its rows; otherwise it stays whole."""
        whole = Part(result)
        product = self._product(self.variables[whole])
        size = self.nbytes(self.variables[whole])
        if product is None or size < 2 * piece_bytes:
            return [whole]
        rows = self.variables[whole].aval.shape[0]
        count = max(k for k in range(1, rows + 1) if (rows // k) * (size // rows) >= piece_bytes or k == 1)
        bounds = [rows * number // count for number in range(count + 1)]
        parts = []
        for start, stop in zip(bounds, bounds[1:], strict=False):
            part = Part(result, (start, stop))
            self.variables[part] = self._add_piece(product, start, stop)
            parts.append(part)
        return parts if count > 1 else [whole]

    def _product(self, atom: Any) -> _Product | None:
        """How a value is a product, if it is one that nothing else reads."""
        if self.place(atom) < 0 or not atom.aval.shape or self._readers(atom):
            return None
        last = self.equations[self.place(atom)]
        axis = 0
        turn = None
        if last.primitive is transpose_p:
            turn, axis = last, last.params["permutation"][0]
            inner = last.invars[0]
            if self.place(inner) < 0 or self._readers(inner) != 1:
                return None
            last = self.equations[self.place(inner)]
        if last.primitive is not dot_general_p:
            return None
        (left, right), (batch, _) = last.params["dimension_numbers"]
        free = [
            [d for d in range(len(operand.aval.shape)) if d not in (*contracted, *batched)]
            for operand, contracted, batched in zip(
                last.invars, (left, right), last.params["dimension_numbers"][1], strict=True
            )
        ]
        axis -= len(batch)
        if axis < 0:
            return None
        side = 0 if axis < len(free[0]) else 1
        return _Product(last, turn, side, free[side][axis - side * len(free[0])])

    def _readers(self, atom: Any) -> int:
        return sum(atom is read for equation in self.equations for read in equation.invars)

    def _add_piece(self, product: _Product, start: int, stop: int) -> Variable:
        operands = list(product.dot.invars)
        operand = operands[product.side]
        shape = operand.aval.shape
        first, limit = [0] * len(shape), list(shape)
        first[product.dimension], limit[product.dimension] = start, stop
        taken = Variable(operand.aval.update(shape=tuple(b - a for a, b in zip(first, limit, strict=True))))
        bounds = {"start_indices": tuple(first), "limit_indices": tuple(limit), "strides": None}
        self.add(core.new_jaxpr_eqn([operand], [taken], slice_p, bounds, frozenset()))
        operands[product.side] = taken
        return product.add_to(self, operands, stop - start)


@dataclass(frozen=True)
class _Product:
    """A matrix product whose rows come from one dimension of one operand.

    Attributes:
        dot: the product.
        turn: the transposition that follows, if one does.
        side: 0 or 1, the operand.
        dimension: of that operand.
    """

    dot: Equation
    turn: Equation | None
    side: int
    dimension: int

    def add_to(self, graph: Graph, operands: Sequence[Any], rows: int) -> Variable:
        """The same product of other operands, with fewer rows."""
        last = self.turn or self.dot
        of_turn = Variable(last.outvars[0].aval.update(shape=(rows, *last.outvars[0].aval.shape[1:])))
        if self.turn is None:
            graph.add(self.dot.replace(invars=list(operands), outvars=[of_turn]))
            return of_turn
        shape = list(self.dot.outvars[0].aval.shape)
        shape[self.turn.params["permutation"][0]] = rows
        of_dot = Variable(self.dot.outvars[0].aval.update(shape=tuple(shape)))
        graph.add(self.dot.replace(invars=list(operands), outvars=[of_dot]))
        graph.add(self.turn.replace(invars=[of_dot], outvars=[of_turn]))
        return of_turn


def _renamed(atom: Any, names: Mapping[Any, Any]) -> Any:
    return atom if isinstance(atom, core.Literal) else names[atom]


# ---- segments


def _segments(graph: Graph, buckets: Sequence[Sequence[Part]]) -> list[Segment]:
    own = _share_out(graph, buckets)
    home = {number: place for place, members in enumerate(own) for number in members}
    repeated, needed = zip(
        *(_look_back(graph, home, place, own, buckets) for place in range(len(buckets))), strict=True
    )
    residuals = {atom: number for number, atom in enumerate(dict.fromkeys(a for atoms in needed for a in atoms))}
    segments = []
    for place, bucket in enumerate(buckets):
        equations = [graph.equations[number] for number in sorted(own[place] | repeated[place])]
        takes = [atom for atom in residuals if atom in needed[place]]
        gives = [atom for atom in residuals if home[graph.producers[atom]] == place]
        segments.append(_segment(graph, equations, list(bucket), takes, gives, residuals))
    return segments


def _share_out(graph: Graph, buckets: Sequence[Sequence[Part]]) -> list[set[int]]:
    """The equations of each bucket that no earlier one has."""
    known: set[int] = set()
    own = []
    for bucket in buckets:
        own.append(graph.ancestors([graph.variables[part] for part in bucket], known))
        known |= own[-1]
    return own


def _look_back(
    graph: Graph, home: Mapping[int, int], place: int, own: Sequence[set[int]], buckets: Sequence[Sequence[Part]]
) -> tuple[set[int], set[Any]]:
    """What a segment needs of earlier ones: equations to repeat, and residuals."""
    repeated: set[int] = set()
    needed: set[Any] = set()
    stack = [atom for number in own[place] for atom in graph.equations[number].invars]
    stack += [graph.variables[part] for part in buckets[place]]
    seen: set[Any] = set()
    while stack:
        atom = stack.pop()
        number = graph.place(atom)
        if number < 0 or home[number] == place or atom in seen:
            continue
        seen.add(atom)
        if graph.is_repeated(number):
            repeated.add(number)
            stack += graph.equations[number].invars
        else:
            needed.add(atom)
    return repeated, needed


def _segment(
    graph: Graph,
    equations: Sequence[Equation],
    parts: list[Part],
    takes: Sequence[Any],
    gives: Sequence[Any],
    residuals: Mapping[Any, int],
) -> Segment:
    results = [graph.variables[part] for part in parts]
    read = {a for equation in equations for a in equation.invars if not isinstance(a, core.Literal)}
    read |= {a for a in results if not isinstance(a, core.Literal)}
    inputs = [number for number, argument in enumerate(graph.arguments) if argument in read]
    constants = [constant for constant in graph.constants if constant in read]
    jaxpr = graph.closed.jaxpr.replace(
        constvars=constants,
        invars=[graph.arguments[number] for number in inputs] + list(takes),
        outvars=results + list(gives),
        eqns=list(equations),
        debug_info=graph.closed.jaxpr.debug_info.with_unknown_names(),
    )
    values = [graph.constants[constant] for constant in constants]
    return Segment(
        partial(jax.core.eval_jaxpr, jaxpr, values),
        tuple(inputs),
        tuple(residuals[atom] for atom in takes),
        tuple(residuals[atom] for atom in gives),
        tuple(parts),
    )
