"""A traced function, cut so that some results leave in buckets while others are still computed.

A gradient is finished when its own equations are, whatever else the backward pass still computes. So each segment takes
exactly the equations that its results need and that no earlier segment has evaluated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jax.extend import core
from jax.extend.core.primitives import dot_general_p, slice_p, transpose_p

from strategies.jax.programs.jaxpr import Atom, Equation, EquationGroup, Graph, Variable, cut, nbytes
from strategies.jax.programs.segments import Part, ProgramSegment

MOVEMENTS = frozenset({"broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "iota"})
"""The names of operations that move data. Repeating them is cheaper than handing on their results."""


def cut_in_buckets(
    closed: core.ClosedJaxpr, early: Sequence[int], bucket_bytes: int, piece_bytes: int
) -> list[ProgramSegment]:
    """Cut a function at some of its results, in the order in which they can be finished.

    Args:
        closed: Traced function without effects.
        early: Positions of the results to be finished early; all others come with the last segment.
        bucket_bytes: Least size of the results that are finished together, in bytes.
        piece_bytes: Least size of a piece in bytes. If the last of the large results is the product of two matrices, it
            is finished in pieces: nothing is left to be computed while it travels. The others stay whole, because a
            product in pieces takes longer (measured for three pieces: a fifth longer).
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
    """Return, for each bucket, the equations that its values need and no earlier bucket has."""
    known: set[int] = set()
    groups = []
    for bucket in buckets:
        own = graph.ancestors(bucket.values(), known)
        known |= own
        groups.append(EquationGroup(own, bucket))
    return groups


# ---- products in pieces


def _divide(graph: Graph, result: int, piece_bytes: int) -> dict[Part, Atom]:
    """Return pieces of rows of a result that is the product of two matrices; none if it is not, or too small."""
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
    """Return the parts of a product; None if the value is not a product, or another equation reads it."""
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
        dot: Equation of the product.
        turn: Transposition that follows, or None.
        side: Number of the operand, 0 or 1.
        dimension: Dimension of that operand.
    """

    dot: Equation
    turn: Equation | None
    side: int
    dimension: int

    def add_rows(self, graph: Graph, start: int, stop: int) -> Variable:
        """Return some rows of the product, made by equations that are added to the graph."""
        operands = list(self.dot.invars)
        operand = operands[self.side]
        shape = operand.aval.shape
        first, limit = [0] * len(shape), list(shape)
        first[self.dimension], limit[self.dimension] = start, stop
        taken = core.Var(operand.aval.update(shape=tuple(b - a for a, b in zip(first, limit, strict=True))))
        bounds = {"start_indices": tuple(first), "limit_indices": tuple(limit), "strides": None}
        graph.add(core.new_jaxpr_eqn([operand], [taken], slice_p, bounds, frozenset()))
        operands[self.side] = taken
        return self._add_product(graph, operands, stop - start)

    def _add_product(self, graph: Graph, operands: Sequence[Atom], rows: int) -> Variable:
        """Return the same product of other operands, with fewer rows."""
        last = self.turn or self.dot
        of_turn = core.Var(last.outvars[0].aval.update(shape=(rows, *last.outvars[0].aval.shape[1:])))
        if self.turn is None:
            graph.add(self.dot.replace(invars=list(operands), outvars=[of_turn]))
            return of_turn
        shape = list(self.dot.outvars[0].aval.shape)
        shape[self.turn.params["permutation"][0]] = rows
        of_dot = core.Var(self.dot.outvars[0].aval.update(shape=tuple(shape)))
        graph.add(self.dot.replace(invars=list(operands), outvars=[of_dot]))
        graph.add(self.turn.replace(invars=[of_dot], outvars=[of_turn]))
        return of_turn
