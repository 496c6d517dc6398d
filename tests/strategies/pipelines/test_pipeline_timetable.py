"""Timetables: refusals, times, and the stash."""

import pytest

from strategies.pipelines.timetable import ActionKind, StageAction, Timed, Timetable, bubble_share, placed

F, B, BI, BW, U = ActionKind
ONE_STAGE = ((StageAction(F, 0, 0), StageAction(B, 0, 0), StageAction(U, 0, None)),)


def actions(text):
    """Parse actions: "F0.1" is the forward pass of stage 0 for micro-batch 1, "U0" an update."""
    kinds = {"F": F, "B": B, "I": BI, "W": BW, "U": U}
    split = [(word[0], *word[1:].split(".")) for word in text.split()]
    return tuple(
        StageAction(kinds[kind], int(stage), int(number[0]) if number else None) for kind, stage, *number in split
    )


def table(*devices, mapping=None, micro_batches=1, training=True, **more):
    mapping = placed(range(len(devices)) if mapping is None else mapping)
    return Timetable(tuple(map(actions, devices)), mapping, micro_batches, training, **more)


def test_actions_have_descriptions():
    assert str(StageAction(F, 2, 3)) == "forward of stage 2 for micro-batch 3"
    assert str(StageAction(BW, 0, 1)) == "backward of weights of stage 0 for micro-batch 1"
    assert str(StageAction(U, 1, None)) == "update of stage 1"


def test_a_mapping_has_lists_for_stages_that_are_lists():
    assert placed([0, [1, 2], 0]) == ((0,), (1, 2), (0,))


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        (["F0.0 U0"], "device 0 lacks the backward of stage 0 for micro-batch 0"),
        (["F0.0 B0.0"], "device 0 lacks the update of stage 0"),
        (["F0.0 F0.0 B0.0 U0"], "has the forward of stage 0 for micro-batch 0, a second time"),
        (["F0.0 B0.0 B0.1 U0"], "backward of stage 0 for micro-batch 1, which does not belong to its stages"),
        (["F0.0 U0 B0.0"], "after an update"),
        (["F0.0 B0.0 I0.0 W0.0 U0"], "has the backward of stage 0 for micro-batch 0, which does not belong"),
        (["F0.0 I0.0 U0"], "lacks the backward of weights of stage 0"),
        (["F0.0 B0.0 U0 F1.0 B1.0 U1"], "forward of stage 1 for micro-batch 0, which does not belong to its stages"),
        (["B0.0 F0.0 U0"], "device 0 for the forward of stage 0 for micro-batch 0, before the backward of stage 0"),
        (["F0.0 W0.0 I0.0 U0"], "for the backward of inputs of stage 0 for micro-batch 0"),
    ],
)
def test_impossible_lists_are_refused(devices, words):
    with pytest.raises(ValueError, match=words):
        table(*devices)


def test_micro_batches_do_not_overtake_each_other():
    with pytest.raises(ValueError, match="backward of stage 0 for micro-batch 0 after that for micro-batch 1"):
        table("F0.0 F0.1 B0.1 B0.0 U0", micro_batches=2)


def test_a_stage_on_a_device_that_has_no_actions_is_refused():
    with pytest.raises(ValueError, match="actions for 1 devices, but stages on device 1"):
        table("F0.0", mapping=[0, 1], training=False)


def test_devices_that_wait_for_each_other_are_refused():
    """Device 1 wants the second micro-batch first, and device 0 waits for the first to come back."""
    with pytest.raises(ValueError, match=r"devices \[0, 1\] would wait forever: device 0 for the backward of stage 1"):
        table("F0.0 B0.0 U0", "B1.0 F1.0 U1")


def test_dependencies_are_the_neighbours_and_the_own_forward_pass():
    made = table("F0.0 I0.0 W0.0 U0", "F1.0 I1.0 W1.0 U1")
    assert made.dependencies(StageAction(F, 0, 0)) == ()
    assert made.dependencies(StageAction(F, 1, 0)) == (StageAction(F, 0, 0),)
    assert made.dependencies(StageAction(BI, 1, 0)) == (StageAction(F, 1, 0),)
    assert made.dependencies(StageAction(BI, 0, 0)) == (StageAction(F, 0, 0), StageAction(BI, 1, 0))
    assert made.dependencies(StageAction(BW, 0, 0)) == (StageAction(BI, 0, 0),)
    assert made.dependencies(StageAction(U, 0, None)) == (StageAction(BW, 0, 0),)


@pytest.mark.parametrize(
    ("devices", "last"),
    [
        (["F0.0 F0.1", "F1.0 F1.1"], ["F1.0"]),
        (["F0.0 B0.0 F0.1 B0.1 U0", "F1.0 B1.0 F1.1 B1.1 U1"], ["B0.0"]),
        (["F0.0 I0.0 W0.0 F0.1 I0.1 W0.1 U0", "F1.0 I1.0 W1.0 F1.1 I1.1 W1.1 U1"], ["W0.0", "W1.0"]),
    ],
)
def test_micro_batches_in_turn_wait_for_the_one_before(devices, last):
    made = table(*devices, micro_batches=2, training=len(last) > 1 or last[0][0] == "B", in_turn=True)
    assert made.dependencies(StageAction(F, 0, 1)) == actions(" ".join(last))
    free = table(*devices, micro_batches=2, training=made.training)
    assert free.dependencies(StageAction(F, 0, 1)) == ()


def test_a_stage_on_several_devices_is_done_when_all_have_done_their_part():
    made = table("F0.0 F1.0", "F1.0 F2.0", mapping=[0, [0, 1], 1], training=False)
    assert [(span.device, span.action.stage, span.begin_s) for span in made.timed()] == [
        (0, 0, 0),
        (0, 1, 1),
        (1, 1, 1),
        (1, 2, 2),
    ]


def test_times_follow_the_durations():
    made = table("F0.0 B0.0 U0", "F1.0 B1.0 U1")
    assert made.timed({(F, 0): 0.5, (F, 1): 2.0, (B, 1): 3.0, (B, 0): 1.0, (U, 0): 0.25, (U, 1): 0.5}) == (
        Timed(0, StageAction(F, 0, 0), 0.0, 0.5),
        Timed(1, StageAction(F, 1, 0), 0.5, 2.5),
        Timed(1, StageAction(B, 1, 0), 2.5, 5.5),
        Timed(0, StageAction(B, 0, 0), 5.5, 6.5),
        Timed(1, StageAction(U, 1, None), 5.5, 6.0),
        Timed(0, StageAction(U, 0, None), 6.5, 6.75),
    )
    assert max(span.end_s for span in made.timed()) == 1 + 1 + 2 + 2 + 1
    assert bubble_share(made.timed({(F, 0): 0.5, (F, 1): 2.0, (B, 1): 3.0, (B, 0): 1.0}), 2) == pytest.approx(
        1 - (0.5 + 2 + 3 + 1 + 2) / (2 * 7.5)
    )


def test_the_share_of_bubbles_counts_from_the_first_begin():
    spans = [Timed(0, StageAction(F, 0, 0), 5.0, 6.0), Timed(1, StageAction(F, 1, 0), 6.0, 7.0)]
    assert bubble_share(spans, 2) == 0.5
    assert bubble_share([], 2) == 0


def test_the_backward_part_for_the_weights_frees_the_stash():
    assert table("F0.0 F0.1 B0.0 B0.1 U0", micro_batches=2).stash(0) == 2
    assert table("F0.0 B0.0 F0.1 B0.1 U0", micro_batches=2).stash(0) == 1
    assert table("F0.0 I0.0 F0.1 I0.1 W0.0 W0.1 U0", micro_batches=2).stash(0) == 2
    assert table("F0.0 F0.1", micro_batches=2, training=False).stash(0) == 0


def test_equal_timetables_are_equal():
    assert table("F0.0 B0.0 U0") == Timetable(ONE_STAGE, ((0,),), 1, True)
    assert table("F0.0 B0.0 U0").actions_of(0) is not None
    assert list(table("F0.0 B0.0 U0").actions_of(0)) == list(ONE_STAGE[0])
