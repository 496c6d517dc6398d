"""Lists of actions: what is refused before anything runs, and what segments get and hand on."""

import re
import weakref

import pytest

from strategies.programs.segments import Part, ProgramSegment, SegmentAction, carry_out, in_turn, refuse_impossible


def segment(takes=(), gives=(), inputs=(0,), parts=1):
    return ProgramSegment(lambda *values: values, inputs, takes, gives, tuple(map(Part, range(parts))))


CHAIN = [segment(gives=(0, 1)), segment(takes=(1,), gives=(2,)), segment(takes=(0, 2), inputs=())]
"""A pass in three segments, the last of which reads what the first one has kept."""


def test_segments_in_turn_are_one_micro_batch_after_another():
    assert list(map(str, in_turn(2, micro_batches=2))) == [
        "segment 0 of micro-batch 0",
        "segment 1 of micro-batch 0",
        "segment 0 of micro-batch 1",
        "segment 1 of micro-batch 1",
    ]


ORDERS = {
    "in turn": in_turn(3, 2),
    "micro-batches side by side": [SegmentAction(place, number) for place in range(3) for number in range(2)],
    "one ahead": [SegmentAction(*pair) for pair in [(0, 1), (0, 0), (1, 0), (2, 0), (1, 1), (2, 1)]],
}


@pytest.mark.parametrize("actions", ORDERS.values(), ids=ORDERS)
def test_segments_get_their_inputs_and_residuals_of_their_own_micro_batch(actions):
    refuse_impossible(actions, CHAIN, 2)
    seen = {}

    def compute(action, given):
        seen[action] = given
        made = [f"{action.segment}{name} of {action.micro_batch}" for name in "ab"]
        return ["finished", *made[: len(CHAIN[action.segment].gives)]]

    done = [action for action, _ in carry_out(actions, CHAIN, [["x of 0"], ["x of 1"]], compute)]
    assert done == list(actions)
    for number in range(2):
        assert seen[SegmentAction(0, number)] == [f"x of {number}"]
        assert seen[SegmentAction(1, number)] == [f"x of {number}", f"0b of {number}"]
        assert seen[SegmentAction(2, number)] == [f"0a of {number}", f"1a of {number}"]


def test_the_next_segment_begins_when_the_last_ones_results_are_taken():
    begun = []

    def compute(action, given):
        begun.append(action.segment)
        return [None, *CHAIN[action.segment].gives]

    results = carry_out(in_turn(3), CHAIN, [[0]], compute)
    next(results)
    assert begun == [0]
    next(results)
    assert begun == [0, 1]


class Residual:
    """An object that can be watched."""


def test_residuals_are_let_go_when_they_were_taken_for_the_last_time():
    kept = {}

    def compute(action, given):
        made = [Residual() for _ in CHAIN[action.segment].gives]
        kept.update({number: weakref.ref(one) for number, one in zip(CHAIN[action.segment].gives, made, strict=True)})
        return [None, *made]

    alive = [{number for number, one in kept.items() if one()} for _ in carry_out(in_turn(3), CHAIN, [["x"]], compute)]
    assert alive[:2] == [{0, 1}, {0, 2}]
    assert not any(one() for one in kept.values())


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (in_turn(2), "the list has segment 2 of micro-batch 0 0 times, for 3 segments and 1 micro-batches"),
        ((*in_turn(3), SegmentAction(1, 0)), "the list has segment 1 of micro-batch 0 2 times"),
        (in_turn(3, 2), "the list has segment 0 of micro-batch 1 1 times, for 3 segments and 1 micro-batches"),
        (in_turn(4), "the list has segment 3 of micro-batch 0 1 times"),
        (
            [SegmentAction(0, 0), SegmentAction(2, 0), SegmentAction(1, 0)],
            "segment 2 of micro-batch 0 takes what segment 1 gives; it must come behind it",
        ),
    ],
)
def test_impossible_lists_are_refused(actions, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        refuse_impossible(actions, CHAIN)


def test_another_micro_batchs_residuals_do_not_do():
    actions = [
        SegmentAction(0, 0),
        SegmentAction(1, 1),
        SegmentAction(0, 1),
        SegmentAction(1, 0),
        SegmentAction(2, 0),
        SegmentAction(2, 1),
    ]
    with pytest.raises(ValueError, match="segment 1 of micro-batch 1 takes what segment 0 gives"):
        refuse_impossible(actions, CHAIN, 2)
