"""A traced function cut so that some results leave in buckets while others are computed.

A gradient is finished as soon as its own equations are: what else the backward pass computes is no concern of it. So
each segment takes exactly the equations that its results need and no earlier segment has evaluated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jax.extend import core
from jax.extend.core.primitives import dot_general_p, slice_p, transpose_p

from strategies.jax.programs.jaxpr import Atom, Equation, EquationGroup, Graph, Variable, cut, nbytes
from strategies.jax.programs.segments import Part, ProgramSegment

MOVEMENTS = frozenset({"broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "iota"})
"""Movements of data: evaluated again where they are needed, which is cheaper than to hand on what they return."""


def cut_in_buckets(
    closed: core.ClosedJaxpr, early: Sequence[int], bucket_bytes: int, piece_bytes: int
) -> list[ProgramSegment]:
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
    large = [number for number in ordered if nbytes(graph.results[number]) >= 2 * piece_bytes]
    parts: dict[Part, Atom] = {}
    for number in ordered:
        pieces = _divide(graph, number, piece_bytes) if number in large[-1:] else {}
        parts |= pieces or {Part(number): graph.results[number]}
    buckets = _fill(parts, bucket_bytes)
    buckets[-1] |= {Part(number): atom for number, atom in enumerate(graph.results) if number not in set(early)}
    return cut(graph, _groups(graph, buckets), lambda equation: equation.primitive.name in MOVEMENTS)


def _fill(parts: dict[Part, Atom], bucket_bytes: int) -> list[dict[Part, Atom]]:
    """Put parts into buckets of at least `bucket_bytes`, without changing their order."""
    buckets: list[dict[Part, Atom]] = [{}]
    filled = 0
    left = sum(map(nbytes, parts.values()))
    for part, atom in parts.items():
        buckets[-1][part] = atom
        filled += nbytes(atom)
        left -= nbytes(atom)
        if filled >= bucket_bytes and left >= bucket_bytes:
            buckets.append({})
            filled = 0
    return buckets


def _groups(graph: Graph, buckets: Sequence[dict[Part, Atom]]) -> list[EquationGroup]:
    """Return for each bucket the equations behind it that no earlier one has."""
    known: set[int] = set()
    groups = []
    for bucket in buckets:
        own = graph.ancestors(bucket.values(), known)
        known |= own
        groups.append(EquationGroup(own, bucket))
    return groups


# ---- products in pieces


def _divide(graph: Graph, result: int, piece_bytes: int) -> dict[Part, Atom]:
    """Pieces of the rows of a result that is the product of two matrices; none if it is not, or too small."""
    whole = graph.results[result]
    product = _product(graph, whole)
    if product is None:
        return {}
    rows, size = whole.aval.shape[0], nbytes(whole)
    count = max(k for k in range(1, rows + 1) if (rows // k) * (size // rows) >= piece_bytes or k == 1)
    if count == 1:
        return {}
    bounds = [rows * number // count for number in range(count + 1)]
    pairs = zip(bounds, bounds[1:], strict=False)
    return {Part(result, (start, stop)): product.add_rows(graph, start, stop) for start, stop in pairs}


def _product(graph: Graph, atom: Atom) -> _Product | None:
    """Return the parts of a product; None if the value is no product, or something else reads it."""
    last = graph.producer(atom)
    if last is None or not atom.aval.shape or graph.readers(atom):
        return None
    axis, turn = 0, None
    if last.primitive is transpose_p:
        turn, axis = last, last.params["permutation"][0]
        last = graph.producer(turn.invars[0])
        if last is None or graph.readers(turn.invars[0]) != 1:
            return None
    if last.primitive is not dot_general_p:
        return None
    contracted, batched = last.params["dimension_numbers"]
    free = [
        [d for d in range(len(operand.aval.shape)) if d not in (*own, *of_batch)]
        for operand, own, of_batch in zip(last.invars, contracted, batched, strict=True)
    ]
    axis -= len(batched[0])
    if axis < 0:
        return None
    side = 0 if axis < len(free[0]) else 1
    return _Product(last, turn, side, free[side][axis - side * len(free[0])])


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

    def add_rows(self, graph: Graph, start: int, stop: int) -> Variable:
        """Return some rows of the product, by equations that are added to the graph."""
        operands = list(self.dot.invars)
        operand = operands[self.side]
        shape = operand.aval.shape
        first, limit = [0] * len(shape), list(shape)
        first[self.dimension], limit[self.dimension] = start, stop
        taken = Variable(operand.aval.update(shape=tuple(b - a for a, b in zip(first, limit, strict=True))))
        bounds = {"start_indices": tuple(first), "limit_indices": tuple(limit), "strides": None}
        graph.add(core.new_jaxpr_eqn([operand], [taken], slice_p, bounds, frozenset()))
        operands[self.side] = taken
        return self._add_product(graph, operands, stop - start)

    def _add_product(self, graph: Graph, operands: Sequence[Atom], rows: int) -> Variable:
        """Return the same product of other operands, with fewer rows."""
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
