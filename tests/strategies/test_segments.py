"""Segments of a program run in turn: their inputs and residuals, and the lifetime of residuals."""

import weakref

from strategies.jax.programs.jaxpr import ProgramSegment, carry_out


def segment(takes=(), gives=(), inputs=(0,)):
    return ProgramSegment(lambda *values: values, inputs, takes, gives, (0,))


CHAIN = [segment(gives=(0, 1)), segment(takes=(1,), gives=(2,)), segment(takes=(0, 2), inputs=())]
"""A pass in three segments; the last one reads the residual of the first."""


def test_segments_get_their_inputs_and_residuals_of_others():
    seen = {}

    def compute(number, given):
        seen[number] = given
        return ["finished", *[f"{number}{name}" for name in "ab"][: len(CHAIN[number].gives)]]

    assert [number for number, _ in carry_out(CHAIN, ["x"], compute)] == [0, 1, 2]
    assert seen == {0: ["x"], 1: ["x", "0b"], 2: ["0a", "1a"]}


def test_the_next_segment_begins_when_the_results_of_the_last_are_taken():
    begun = []

    def compute(number, given):
        begun.append(number)
        return [None, *CHAIN[number].gives]

    results = carry_out(CHAIN, [0], compute)
    next(results)
    assert begun == [0]
    next(results)
    assert begun == [0, 1]


class Residual:
    """An object whose lifetime can be watched."""


def test_residuals_are_freed_after_their_last_use():
    kept = {}

    def compute(number, given):
        made = [Residual() for _ in CHAIN[number].gives]
        kept.update({place: weakref.ref(one) for place, one in zip(CHAIN[number].gives, made, strict=True)})
        return [None, *made]

    alive = [{number for number, one in kept.items() if one()} for _ in carry_out(CHAIN, ["x"], compute)]
    assert alive[:2] == [{0, 1}, {0, 2}]
    assert not any(one() for one in kept.values())
