"""Loss of an instance in a step of any engine: the survivors end with the bits of an undisturbed training.

An instance is lost at each event that its instruments see, and in place of each of its messages.
"""

from __future__ import annotations

import functools
import itertools
import logging

import pytest
from engine_rows import EVALUATED, EVERY, REPLICAS, ROWS, Row, batches, in_jax, in_numpy, train
from losing_at_events import BEFORE, Events, run_losing
from surviving_instances import run_instances

from collectives import PeerLostError

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


def trained(row: Row, count: int, mechanism: str, *all_events: Events, evaluates: bool = False) -> list[object]:
    """Return the results of each instance after a training with the given events."""
    function = functools.partial(train, row=row, evaluates=evaluates)
    return run_losing(count, REPLICAS, function, mechanism, *all_events, defaults=row.of_survivors)


@functools.cache
def undisturbed(row: Row, evaluates: bool):
    [found] = run_instances(
        1, REPLICAS, functools.partial(train, row=row, evaluates=evaluates), defaults=row.of_survivors
    )
    return found


def check(found, row, *lost, evaluates=False):
    expected = undisturbed(row, evaluates)
    assert found == [None if instance in lost else expected for instance in range(len(found))]


CASES = [
    (count, lost, step, mechanism)
    for count, lost in ((2, 0), (2, 1), (3, 0), (3, 1), (3, 2))
    for step in (BEFORE, 0, EVALUATED)
    for mechanism in ("window", "ring")
]
FEW = [(2, 0, 0, "window"), (3, 1, BEFORE, "ring"), (2, 1, EVALUATED, "window")]


def case_of(row: Row, case: tuple[int, int, int, str]):
    """Make a case, which belongs to the complete tier unless it is among a few."""
    given = row.as_parameter
    is_short = case in FEW[: 1 if row.defaults else 3 if row.training is in_numpy else 2]
    marks = [*given.marks, *([] if is_short else [pytest.mark.complete])]
    return pytest.param(row, *case, marks=marks, id="-".join(map(str, (row.name, *case))))


@pytest.mark.parametrize(
    ("row", "count", "lost", "step", "mechanism"), [case_of(row, case) for row in ROWS for case in CASES]
)
def test_survivors_end_with_the_same_bits(row, count, lost, step, mechanism):
    """Before the step EVALUATED a data set is evaluated and predicted; an instance is lost there too."""
    options, of_all = {"evaluates": step == EVALUATED}, Events(lost, step)
    check(trained(row, count, mechanism, of_all, **options), row, **options)
    for number in range(len(of_all.seen)):
        check(trained(row, count, mechanism, Events(lost, step, number), **options), row, lost, **options)


WAYS = list(itertools.product(("raise", "stop", "cut"), ("data", "forward", "all_reduce", "update")))


@EVERY
@pytest.mark.parametrize(("kind", "phase"), WAYS)
def test_survivors_end_with_the_same_bits_after_every_kind_of_loss(row, kind, phase):
    number = WAYS.index((kind, phase))
    count = 2 + number % 2
    lost = number % count
    faults = [f"{kind}:instance={lost},step=1,phase={phase}"]
    mechanism = "ring" if kind == "cut" else "window"
    function, defaults = functools.partial(train, row=row), row.of_survivors
    check(run_instances(count, REPLICAS, function, faults, mechanism=mechanism, defaults=defaults), row, lost)


def in_tiers(row: Row, step: int):
    """Make a case, which belongs to the complete tier if it is long."""
    given = row.as_parameter
    is_long = step > 0 or row.training is in_jax or row.defaults is not None
    return pytest.param(row, step, marks=[*given.marks, *([pytest.mark.complete] if is_long else [])])


@pytest.mark.parametrize(("row", "step"), [in_tiers(row, step) for row in ROWS for step in (0, 2)])
def test_a_second_instance_can_be_lost_while_one_takes_over_a_state(row, step):
    """One of three instances is lost; the other needs its message to complete the step."""
    first = Events(2, step)
    check(trained(row, 3, "ring", first), row)
    number = max(number for number, name in enumerate(first.seen) if "message" in name)
    both = [Events(instance, step, in_recovery=True) for instance in (0, 1)]
    check(trained(row, 3, "ring", Events(2, step, number), *both), row, 2)
    assert any("broadcast" in name for name in both[0].seen), "nobody has been behind"
    for instance, of_all in enumerate(both):
        for later in range(len(of_all.seen)):
            second = Events(instance, step, later, in_recovery=True)
            check(trained(row, 3, "ring", Events(2, step, number), second), row, instance, 2)


@pytest.mark.parametrize("row", [row.as_parameter for row in ROWS if row.training is not in_jax])
def test_state_held_by_one_instance_alone_is_lost_with_the_instance(row, caplog):
    """The job warns of that at its beginning, and ends; the others have the state from the start of the step."""
    have_same = []

    def function(strategy):
        with row.training(strategy, replicated_optimizer_state_sharding=True) as training:
            given = batches(strategy)
            training.step(next(given))
            before = training.bits
            try:
                training.step(next(given))
            finally:
                have_same.append(training.bits == before)

    with caplog.at_level(logging.WARNING), pytest.raises(PeerLostError, match="rank 1 is lost"):
        run_instances(3, REPLICAS, function, ["kill:instance=1,step=1,phase=all_reduce"], defaults=row.of_survivors)
    assert have_same == [True] * 3
    assert "a part of the state that no other has (sharded optimizer state): if an instance is lost" in caplog.text
