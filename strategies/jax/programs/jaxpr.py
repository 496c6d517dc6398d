"""The programs that JAX traces: their equations and dataflow, cutting them, and evaluating their segments.

All code that looks into traced programs goes through this file. All cuts are the same operation: recomputation and
pipelines only decide which equations make a segment.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from strategies.late_jax import jax
from strategies.late_jax import jax_core as core
from strategies.typing import Function, Leaf, Tree


@dataclass(frozen=True)
class ProgramSegment:
    """A part of a program: `function(*inputs, *intermediates) -> (*results, *intermediates)`.

    Attributes:
        function: Traceable function.
        inputs: Positions of the program's flat arguments that it reads.
        takes: Numbers of the intermediates that it reads.
        gives: Numbers of the intermediates that it hands on.
        results: Positions of the program's results that it finishes.
    """

    function: Callable[..., Sequence[Leaf]]
    inputs: tuple[int, ...]
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    results: tuple[int, ...]

    def read(self, arguments: Sequence[Leaf], intermediates: Mapping[int, Leaf]) -> list[Leaf]:
        """Return the arguments of the function."""
        return [arguments[place] for place in self.inputs] + [intermediates[number] for number in self.takes]


Compute = Callable[[int, list[Leaf]], Sequence[Leaf]]
"""A function (number of a segment, its arguments) -> its results, intermediates last."""


def carry_out(
    segments: Sequence[ProgramSegment], arguments: Sequence[Leaf], compute: Compute
) -> Iterator[tuple[int, Sequence[Leaf]]]:
    """Yield the number of each segment with its results, in turn. The next one begins when it is asked for.

    An intermediate is released when it was taken for the last time.

    Args:
        segments: Segments of the program; each takes only intermediates of earlier segments.
        arguments: Flat arguments of the program.
        compute: Function that computes a segment; values may be arrays, tracers or shapes.
    """
    last = {taken: number for number, segment in enumerate(segments) for taken in segment.takes}
    intermediates: dict[int, Leaf] = {}
    for number, segment in enumerate(segments):
        read = [arguments[position] for position in segment.inputs]
        for taken in segment.takes:
            read.append(intermediates.pop(taken) if last[taken] == number else intermediates[taken])
        results = compute(number, read)
        del read  # otherwise the arguments would live as long as the caller uses the results
        if segment.gives:
            intermediates.update(zip(segment.gives, results[len(results) - len(segment.gives) :], strict=True))
        yield number, results


Variable: TypeAlias = Any
"""A `jax.extend.core.Var`; its `aval` has a shape here, which JAX's types do not declare."""

Equation: TypeAlias = Any
"""A `jax.extend.core.JaxprEqn`."""

Atom: TypeAlias = Any
"""A variable or a literal: an operand of an equation, or a result of a program."""

_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "call"})
_CALLS_WITH_RULES = frozenset({"custom_jvp_call", "custom_vjp_call"})


# ---- looking through equations


def variables(atoms: Iterable[Atom]) -> Iterator[Variable]:
    """Return the atoms that are not literals."""
    return (atom for atom in atoms if not isinstance(atom, core.Literal))


def bodies(equation: Equation) -> Iterator[core.Jaxpr]:
    """Yield the programs in an equation: the body of a loop, branch or call, or a function of two elements."""
    for value in equation.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, core.ClosedJaxpr):
                yield one.jaxpr
            elif isinstance(one, core.Jaxpr):
                yield one


def every_equation(jaxpr: core.Jaxpr) -> Iterator[Equation]:
    """Yield the equations of a program in order, each before the equations of the programs in it."""
    for equation in jaxpr.eqns:
        yield equation
        for body in bodies(equation):
            yield from every_equation(body)


def body_of_call(equation: Equation, is_derived: bool = False) -> core.ClosedJaxpr | None:
    """Return the program that an equation evaluates once, with its own operands; None for other equations.

    Args:
        equation: Equation of a traced program.
        is_derived: Whether the program will not be differentiated any more. Otherwise functions with custom
            derivatives, and functions under `jax.checkpoint`, do not count as calls.
    """
    calls = _CALLS | _CALLS_WITH_RULES if is_derived else _CALLS
    if equation.primitive.name not in calls and not (is_derived and is_checkpoint(equation)):
        return None
    body = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    return body if isinstance(body, core.ClosedJaxpr) else core.ClosedJaxpr(body, ())


def is_checkpoint(equation: Equation) -> bool:
    """Return whether an equation is a function under `jax.checkpoint`."""
    return "prevent_cse" in equation.params


def producers_of(equations: Sequence[Equation]) -> dict[Variable, int]:
    """Return, for each variable, the number of the equation that makes it."""
    return {variable: number for number, equation in enumerate(equations) for variable in equation.outvars}


def ancestors(atoms: Iterable[Atom], equations: Sequence[Equation], producers: Mapping[Variable, int]) -> set[int]:
    """Return the numbers of the equations that some values need."""
    found: set[int] = set()
    stack = list(variables(atoms))
    while stack:
        number = producers.get(stack.pop())
        if number is not None and number not in found:
            found.add(number)
            stack += variables(equations[number].invars)
    return found


# ---- evaluating


def needed(jaxpr: core.Jaxpr) -> list[Equation]:
    """Return the equations on which results depend, in order."""
    found = ancestors(jaxpr.outvars, jaxpr.eqns, producers_of(jaxpr.eqns))
    return [jaxpr.eqns[number] for number in sorted(found)]


def is_read(jaxpr: core.Jaxpr, argument: Variable) -> bool:
    """Return whether an argument is read by an equation, or is a result."""
    atoms = itertools.chain(jaxpr.outvars, *(equation.invars for equation in jaxpr.eqns))
    return any(atom is argument for atom in atoms)


def evaluate(
    closed: core.ClosedJaxpr,
    arguments: Sequence[Leaf],
    results_of: Callable[[Equation, list[Any]], Sequence[Any]],
) -> list[Leaf]:
    """Return the results of a program whose equations are evaluated by a function.

    Args:
        closed: Program.
        arguments: Flat arguments of the program.
        results_of: Function `(equation, values of its operands) -> values of its results`, such as `bind`.
    """
    jaxpr = closed.jaxpr
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *arguments], strict=True))

    def read(atom: Atom) -> Leaf:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        results = results_of(equation, [read(atom) for atom in equation.invars])
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def bind(like: core.Jaxpr, equation: Equation, given: Sequence[Leaf]) -> list[Leaf]:
    """Evaluate an equation in its context, as JAX does in a program.

    Args:
        like: Any program of the same trace.
        equation: Equation, which may have been changed.
        given: Values of its operands.
    """
    takes = [core.Var(atom.aval) for atom in equation.invars]  # new ones, because an operand may occur twice
    gives = [core.Var(variable.aval) for variable in equation.outvars]
    one = _program(like, takes, [equation.replace(invars=takes, outvars=gives)], gives)
    return jax.core.eval_jaxpr(one, (), *given)


def with_bodies(equation: Equation, change: Callable[[core.ClosedJaxpr], core.ClosedJaxpr]) -> Equation:
    """Return the equation with changed programs in it, which take and return the same shapes."""

    def changed(value: Tree) -> Leaf:
        if isinstance(value, tuple) and any(isinstance(one, core.ClosedJaxpr) for one in value):
            return tuple(map(changed, value))
        return change(value) if isinstance(value, core.ClosedJaxpr) else value

    return equation.replace(params={name: changed(value) for name, value in equation.params.items()})


def _program(
    like: core.Jaxpr,
    takes: Sequence[Variable],
    equations: Sequence[Equation],
    gives: Sequence[Atom],
    constants: Sequence[Variable] = (),
) -> core.Jaxpr:
    program: core.Jaxpr = like.replace(
        constvars=list(constants),
        invars=list(takes),
        outvars=list(gives),
        eqns=list(equations),
        effects=frozenset(effect for equation in equations for effect in equation.effects),
        debug_info=like.debug_info.with_unknown_names(),
    )
    return program


# ---- cutting


@dataclass
class Graph:
    """The equations of a function, with plain calls inlined, and the equation that makes each variable.

    Attributes:
        closed: Function as it was traced.
        arguments: Its arguments in this graph.
        constants: Values that it closes over.
        results: Its results.
        equations: Its equations, in an order in which they can be evaluated.
        producers: Number of the equation that makes each variable.
    """

    closed: core.ClosedJaxpr
    arguments: list[Variable] = field(default_factory=list)
    constants: dict[Variable, Any] = field(default_factory=dict)
    results: list[Atom] = field(default_factory=list)
    equations: list[Equation] = field(default_factory=list)
    producers: dict[Variable, int] = field(default_factory=dict)

    @classmethod
    def of(cls, closed: core.ClosedJaxpr) -> Graph:
        """Return the graph of a traced function, which may be differentiated later."""
        jaxpr = closed.jaxpr
        graph = cls(closed, [core.Var(var.aval) for var in jaxpr.invars])
        names: dict[Any, Any] = dict(zip(jaxpr.invars, graph.arguments, strict=True))
        names |= graph._constants(jaxpr.constvars, closed.consts)
        graph.results = graph._inline(jaxpr, names)
        return graph

    def _constants(self, constvars: Iterable[Variable], values: Iterable[Leaf]) -> dict[Atom, Leaf]:
        names = {}
        for variable, value in zip(constvars, values, strict=True):
            names[variable] = core.Var(variable.aval)
            self.constants[names[variable]] = value
        return names

    def _inline(self, jaxpr: core.Jaxpr, names: dict[Any, Any], outer: Any = None) -> list[Atom]:
        """Inline the equations of a jaxpr under new names, in the scopes of its callers; return its results' names."""
        for equation in jaxpr.eqns:
            values = [_renamed(atom, names) for atom in equation.invars]
            body = body_of_call(equation)
            own = equation.source_info.name_stack
            scopes = own if outer is None else outer + own
            if body is not None:
                inside = dict(zip(body.jaxpr.invars, values, strict=True))
                inside |= self._constants(body.jaxpr.constvars, body.consts)
                names.update(zip(equation.outvars, self._inline(body.jaxpr, inside, scopes), strict=True))
            else:
                fresh = [core.Var(var.aval) for var in equation.outvars]
                names.update(zip(equation.outvars, fresh, strict=True))
                where = equation.source_info.replace(name_stack=scopes)
                self.add(equation.replace(invars=values, outvars=fresh, source_info=where))
        return [_renamed(atom, names) for atom in jaxpr.outvars]

    def add(self, equation: Equation) -> None:
        """Append an equation."""
        self.producers.update(dict.fromkeys(equation.outvars, len(self.equations)))
        self.equations.append(equation)

    def lift_constants(self) -> list[Leaf]:
        """Make the constants arguments, before the others; return their values."""
        values = list(self.constants.values())
        self.arguments = [*self.constants, *self.arguments]
        self.constants = {}
        return values

    def producer(self, atom: Atom) -> Equation | None:
        """Return the equation that makes a value; None for arguments, constants and literals."""
        number = self.place(atom)
        return None if number < 0 else self.equations[number]

    def place(self, atom: Atom) -> int:
        """Return the number of the equation that makes a value; -1 for arguments, constants and literals."""
        return -1 if isinstance(atom, core.Literal) else self.producers.get(atom, -1)

    def ancestors(self, atoms: Iterable[Atom]) -> set[int]:
        """Return the numbers of the equations that some values need, as the function `ancestors` does."""
        return ancestors(atoms, self.equations, self.producers)


def _renamed(atom: Atom, names: Mapping[Any, Any]) -> Atom:
    return atom if isinstance(atom, core.Literal) else names[atom]


@dataclass(frozen=True)
class EquationGroup:
    """The equations of a graph that make a segment.

    Attributes:
        equations: Numbers of the equations.
        results: Results that the segment finishes, by their positions.
    """

    equations: Collection[int]
    results: Mapping[int, Atom] = field(default_factory=dict)


def cut(
    graph: Graph, groups: Sequence[EquationGroup], is_repeated: Callable[[Equation], bool] = lambda equation: False
) -> list[ProgramSegment]:
    """Cut a function into segments that run in the order of the groups.

    A value that a segment reads from an earlier one is handed on as an intermediate. The arithmetic stays the same, and
    the same function is always cut into the same segments.

    Args:
        graph: Graph of the function.
        groups: Groups, one for each segment; an equation is in at most one of them.
        is_repeated: Function that says whether an equation is evaluated again in each segment that reads its results,
            which are then no intermediates; the equation need not be in a group.

    Raises:
        ValueError: A segment reads a value that no earlier segment makes.
    """
    home = {number: place for place, group in enumerate(groups) for number in group.equations}
    looks = [_look_back(graph, home, place, group, is_repeated) for place, group in enumerate(groups)]
    every = {atom for _, needed in looks for atom in needed}
    made = sorted({graph.producers[atom] for atom in every})
    ordered = [atom for number in made for atom in graph.equations[number].outvars if atom in every]
    order = {atom: number for number, atom in enumerate(ordered)}
    segments = []
    for place, (group, (repeated, needed)) in enumerate(zip(groups, looks, strict=True)):
        takes = [atom for atom in order if atom in needed]
        gives = [atom for atom in order if home[graph.producers[atom]] == place]
        segments.append(_segment(graph, group, repeated, (takes, gives), order))
    return segments


def _look_back(
    graph: Graph, home: Mapping[int, int], place: int, group: EquationGroup, is_repeated: Callable[[Equation], bool]
) -> tuple[set[int], set[Variable]]:
    """Return the equations that a segment has to repeat, and its intermediates from earlier segments."""
    repeated: set[int] = set()
    needed: set[Variable] = set()
    stack = [atom for number in group.equations for atom in graph.equations[number].invars]
    stack += group.results.values()
    while stack:
        atom = stack.pop()
        number = graph.place(atom)
        if number < 0 or home.get(number) == place or atom in needed or number in repeated:
            continue
        if is_repeated(graph.equations[number]):
            repeated.add(number)
            stack += graph.equations[number].invars
            continue
        if home.get(number, math.inf) > place:
            raise ValueError(
                f"segment {place} reads a result of {graph.equations[number].primitive}, which is in "
                f"{f'segment {home[number]}' if number in home else 'none'}; put it in this segment or an earlier one"
            )
        needed.add(atom)
    return repeated, needed


def _segment(
    graph: Graph,
    group: EquationGroup,
    repeated: Collection[int],
    handed_on: tuple[Sequence[Variable], Sequence[Variable]],
    order: Mapping[Variable, int],
) -> ProgramSegment:
    takes, gives = handed_on
    equations = [graph.equations[number] for number in sorted({*group.equations, *repeated})]
    results = list(group.results.values())
    read = set(variables(atom for equation in equations for atom in equation.invars)) | set(variables(results))
    inputs = [number for number, argument in enumerate(graph.arguments) if argument in read]
    constants = [constant for constant in graph.constants if constant in read]
    reads = [*(graph.arguments[number] for number in inputs), *takes]
    jaxpr = _program(graph.closed.jaxpr, reads, equations, [*results, *gives], constants)
    return ProgramSegment(
        partial(jax.core.eval_jaxpr, jaxpr, [graph.constants[constant] for constant in constants]),
        tuple(inputs),
        tuple(order[atom] for atom in takes),
        tuple(order[atom] for atom in gives),
        tuple(group.results),
    )


# ---- dataflow: which arrays a function changes, and whether it combines elements of an array

_SAME_VALUES = frozenset({"convert_element_type", "reshape", "copy", "broadcast_in_dim"})
_SUMS = frozenset({"add", "add_any", "scatter-add"})

_ACROSS = frozenset(
    {
        "argmax", "argmin", "cholesky", "concatenate", "conv_general_dilated", "cumlogsumexp", "cummax", "cummin",
        "cumprod", "cumsum", "dot_general", "eig", "eigh", "ffi_call", "fft", "gather", "householder_product",
        "io_callback", "lu", "pad", "pure_callback", "qr", "rev", "scatter", "scatter-add", "sort", "svd", "top_k",
        "transpose", "triangular_solve", "tridiagonal_solve", "dynamic_slice", "dynamic_update_slice",
    }
)  # fmt: skip

_LOOPS_AND_BRANCHES = frozenset({"cond", "scan", "while"})
_BY_PLACE = frozenset({"random_bits", "random_seed", "random_wrap", "random_fold_in", "random_split", "threefry2x32"})
"""The operations whose elements depend on their places in the array."""


def looks(function: Function, old: Sequence[Leaf], *others: Leaf) -> tuple[list[bool], list[bool]]:
    """Return, for each array, whether a function changes it, and whether the function only adds to it.

    Args:
        function: Traceable function `(arrays, *others) -> new arrays`.
        old: Arrays, or their shapes and dtypes.
        others: Further arguments.
    """
    graph = Graph.of(jax.make_jaxpr(function)(list(old), *others))
    pairs = list(zip(graph.arguments[: len(old)], graph.results, strict=True))
    return [new is not before for before, new in pairs], [_adds(graph, before, new) for before, new in pairs]


def depends_on(function: Function, old: Sequence[Leaf], matters: Sequence[bool], *others: Leaf) -> list[bool]:
    """Return, for each result, whether it depends on the old arrays that matter, or on any other argument.

    Args:
        function: Traceable function `(arrays, *others) -> new arrays`.
        old: Arrays, or their shapes and dtypes.
        matters: Whether each of these arrays matters.
        others: Further arguments.
    """
    graph = Graph.of(jax.make_jaxpr(function)(list(old), *others))
    chosen = [one for one, flag in zip(graph.arguments, matters, strict=False) if flag]
    return [_depends(graph, result, [*chosen, *graph.arguments[len(old) :]]) for result in graph.results]


def _adds(graph: Graph, before: Atom, new: Atom) -> bool:
    """Return whether the new value is a sum that has `before` as one term, and no other term depends on `before`."""
    if new is before:
        return True
    equation = graph.producer(new)
    if equation is None:
        return False
    name, parts = equation.primitive.name, list(equation.invars)
    if name in _SAME_VALUES:
        return _adds(graph, before, parts[0])
    depend = [part for part in parts if _depends(graph, part, [before])]
    return name in _SUMS and len(depend) == 1 and _adds(graph, before, depend[0])


def _depends(graph: Graph, atom: Atom, others: Sequence[Atom]) -> bool:
    """Return whether a value is one of `others`, or computed from one of them."""
    read = {id(one) for one in others}
    behind = (graph.equations[number] for number in graph.ancestors([atom]))
    return id(atom) in read or any(id(one) in read for equation in behind for one in equation.invars)


def first_across_elements(closed: core.ClosedJaxpr) -> str | None:
    """Return the first operation of a traced function that combines or moves elements of an array, and its operand.

    Returns:
        Text such as "reduce_sum of float32[784,1024]"; None if there is no such operation.
    """
    equations = list(every_equation(closed.jaxpr))
    programs = [closed, *(equation.params.get("jaxpr") for equation in equations)]
    if any(np.size(constant) > 1 for program in programs for constant in getattr(program, "consts", ())):
        return "an array of constants, whose elements belong to places"
    for equation in equations:
        name = equation.primitive.name
        operands = [atom.aval for atom in equation.invars if getattr(atom.aval, "size", 0) > 1]
        sizes = {getattr(out.aval, "size", 0) for out in equation.outvars}
        if name in _BY_PLACE or name.startswith("rng_") or (name == "iota" and max(sizes) > 1):
            return f"{name}, which depends on the places of elements"
        if operands and (name in _ACROSS or name.startswith("reduce_") and name != "reduce_precision"):
            return f"{name} of {operands[0].str_short()}"
        if any({operand.size} != sizes for operand in operands) and not _is_looked_into(equation):  # such as slices
            return f"{name} of {operands[0].str_short()}"
    return None


def operations(closed: core.ClosedJaxpr) -> list[tuple[str, ...]]:
    """Return the operations of a traced function in order, each with its literals, after the function's constants."""
    own = tuple(str(value) for value in closed.consts if np.size(value) == 1)
    return [own, *((equation.primitive.name, *_numbers(equation)) for equation in every_equation(closed.jaxpr))]


def _is_looked_into(equation: Equation) -> bool:
    """Return whether the programs in an equation show everything that it does with elements."""
    name, given = equation.primitive.name, equation.params
    takes_rows = name == "scan" and len(equation.invars) > given["num_consts"] + given["num_carry"]
    return not takes_rows and (name in _LOOPS_AND_BRANCHES or body_of_call(equation, is_derived=True) is not None)


def _numbers(equation: Equation) -> Iterator[str]:
    return (str(atom.val) for atom in equation.invars if isinstance(atom, core.Literal))
