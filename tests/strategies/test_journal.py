"""The journal of one instance: entries of active instances, and their replay on a spare."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import strategies
import strategies.trees as trees
from strategies.core.journal import BecameSpareError, InstanceProgress, Journal, Recorded
from strategies.errors import SpareError
from strategies.jax.replicas.sharding import TreeNodes
from strategies.placeholders import (
    ENTRY_LIMIT,
    Placeholder,
    fill,
    packed,
    placeholders_like,
    read,
    unpacked,
    zeros_for_placeholders,
)


class Member:
    """A membership with a list of entries: an active instance adds to it, a spare reads it."""

    def __init__(self, entries=None, keeps=True):
        self.waits = entries is not None
        self.keeps = keeps
        self.entries = list(entries or ())
        self.changes = False
        self.begins_after = []

    def is_spare(self):
        return self.waits

    def keeps_journal(self):
        return self.keeps

    def may_change(self, is_so, was_so=False):
        self.changes = is_so
        self.begins_after.append(was_so) if is_so else None

    def takes_values(self):
        self.lacks_values = False

    def publish(self, entry):
        self.entries.append(entry())

    def next_entry(self):
        if not self.entries:
            return None
        return self.entries.pop(0)


RAN = []


def run(code):
    RAN.append(code)


class Stranger:
    """An object whose pickle calls a function."""

    def __reduce__(self):
        return run, ("code of a stranger",)


def number(kind="count"):
    return Recorded(kind, lambda found: lambda: found, lambda told: told)


def journal_of(member):
    progress = InstanceProgress()
    return Journal(member, progress, TreeNodes()), progress


def recorded(*bodies, kind="count"):
    """Return the entries of operations on an active instance."""
    member = Member()
    journal, progress = journal_of(member)
    for body in bodies:
        journal.perform(number(kind), lambda body=body: (progress.complete(), body())[1])
    journal.flush()
    return member.entries


def refuse():
    raise AssertionError("a spare computes nothing")


class TestRecords:
    def test_a_spare_gets_the_results_in_order_and_computes_nothing(self):
        journal, progress = journal_of(Member(recorded(lambda: 5, lambda: 7)))
        assert [journal.perform(number(), refuse) for _ in range(2)] == [5, 7]
        assert (progress.done, progress.entries) == (2, 2)

    def test_the_newest_entry_waits_until_the_next_operation_is_complete(self):
        """Until then the operation may be complete on this instance alone, and a spare must not know more."""
        member = Member()
        journal, _ = journal_of(member)
        counts = []
        for _ in range(3):
            journal.perform(number(), lambda: 1)
            counts.append(len(member.entries))
        assert counts == [0, 1, 2]
        journal.flush()
        assert len(member.entries) == 3

    def test_only_the_outermost_operation_has_an_entry(self):
        member = Member()
        journal, _ = journal_of(member)
        journal.perform(number("outer"), lambda: journal.perform(number("inner"), lambda: 3) + 1)
        journal.flush()
        spare, _ = journal_of(Member(member.entries))
        assert spare.perform(number("outer"), refuse) == 4
        assert len(member.entries) == 1

    def test_without_spares_nothing_is_kept(self):
        member = Member(keeps=False)
        journal, progress = journal_of(member)
        assert journal.perform(number(), lambda: 3) == 3
        journal.begin_unrepeatable("prediction")
        journal.flush()
        assert (member.entries, progress.entries) == ([], 0)


class TestSparesThatCannotFollow:
    def test_another_kind_of_operation_is_refused(self):
        journal, _ = journal_of(Member(recorded(lambda: 5, kind="step")))
        with pytest.raises(SpareError, match="does 'evaluation' where the active instances have done 'step'"):
            journal.perform(number("evaluation"), refuse)

    def test_an_error_of_the_active_instances_is_not_replayed(self):
        def fail():
            raise ValueError("no such rate")

        with pytest.raises(ValueError, match="rate"):
            recorded(fail)
        member = Member()
        active, _ = journal_of(member)
        with pytest.raises(ValueError, match="rate"):
            active.perform(number(), fail)
        active.flush()
        journal, _ = journal_of(Member(member.entries))
        with pytest.raises(SpareError, match="it has raised ValueError: no such rate"):
            journal.perform(number(), refuse)

    def test_a_result_that_cannot_be_encoded_is_refused_on_the_spare_only(self):
        journal, _ = journal_of(Member(recorded(lambda: lambda: None)))
        with pytest.raises(SpareError, match="its result cannot be kept: TypeError: .* builtins.function"):
            journal.perform(number(), refuse)

    def test_an_entry_runs_no_code_of_its_sender(self):
        """A pickle would: any process that takes the place of the feeding instance could send one."""
        journal, _ = journal_of(Member([pickle.dumps(("count", 1, 0, Stranger(), ""))]))
        with pytest.raises(SpareError, match="an entry of the journal is damaged: part 0 ends at byte"):
            journal.perform(number(), refuse)
        assert not RAN

    def test_a_result_of_another_form_is_refused(self):
        journal, _ = journal_of(Member(recorded(lambda: "text")))
        pair = Recorded("count", lambda found: lambda: found, lambda told: told["number"])
        with pytest.raises(SpareError, match="the result of 'count' .* has another form than this program's"):
            journal.perform(pair, refuse)

    def test_an_operation_without_results_is_refused_when_the_others_have_gone_on(self):
        member = Member()
        active, _ = journal_of(member)
        active.begin_unrepeatable("prediction")
        assert member.entries == []
        active.perform(number(), lambda: 1)
        journal, _ = journal_of(Member(member.entries))
        with pytest.raises(SpareError, match="cannot replay 'prediction'"):
            journal.begin_unrepeatable("prediction")

    def test_no_spare_joins_in_an_operation_that_cannot_be_repeated(self):
        journal, _ = journal_of(Member([]))
        with pytest.raises(SpareError, match="lost in 'reduce', which the others cannot repeat"):
            journal.perform(number("reduce"), refuse, survives=False)


class TestChangesOfRole:
    def test_a_chosen_spare_takes_part_in_the_operation_after_the_last_entry(self):
        member = Member(recorded(lambda: 5))
        journal, _ = journal_of(member)

        def join():
            assert journal.is_joining
            member.waits = journal.is_joining = False
            return 6

        assert [journal.perform(number(), join) for _ in range(2)] == [5, 6]
        journal.flush()
        assert len(member.entries) == 1

    def test_an_instance_that_becomes_a_spare_replays_the_interrupted_operation(self):
        member = Member()
        journal, _ = journal_of(member)

        def leave():
            member.waits, member.entries = True, recorded(lambda: 9)
            raise BecameSpareError

        assert journal.perform(number(), leave) == 9


class TestPlaceholders:
    TREE = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.int32(4)}

    def waiting(self, tree):
        def wait():
            raise SpareError("no values yet")

        return placeholders_like(tree, wait)

    def test_placeholders_have_shapes_and_dtypes(self):
        found = self.waiting(self.TREE)
        assert (found["w"].shape, found["w"].dtype, found["w"].nbytes, len(found["w"])) == ((2, 3), np.float32, 24, 2)
        assert any(isinstance(leaf, Placeholder) for leaf in trees.leaves(found))
        assert not any(isinstance(leaf, Placeholder) for leaf in trees.leaves(self.TREE))

    @pytest.mark.parametrize(
        "use",
        [
            np.asarray,
            lambda leaf: leaf + 1,
            lambda leaf: 2 * leaf,
            lambda leaf: np.sum(leaf),
            lambda leaf: leaf.sum(),
            lambda leaf: leaf[0],
            list,
            float,
            bool,
            copy.deepcopy,
            lambda leaf: f"{leaf:.3f}",
        ],
    )
    def test_reading_raises_one_error(self, use):
        with pytest.raises(SpareError):
            use(self.waiting(self.TREE)["w"])

    def test_jax_raises_the_same_error(self):
        jnp = pytest.importorskip("jax.numpy")
        with pytest.raises(SpareError, match="no values yet"):
            jnp.add(self.waiting(self.TREE)["w"], 1)

    def test_placeholders_get_the_values_of_an_active_instance(self):
        found = self.waiting(self.TREE)
        assert zeros_for_placeholders(found)["w"].tolist() == [[0, 0, 0]] * 2
        fill(found, self.TREE)
        assert read(found)["w"] is self.TREE["w"] is zeros_for_placeholders(found)["w"]
        assert (found["w"] + 1).tolist() == [[1, 2, 3], [4, 5, 6]]

    def test_one_of_an_earlier_moment_never_gets_values(self):
        with pytest.raises(SpareError, match="of an earlier moment"):
            np.asarray(Placeholder((2,), np.dtype(np.float32), lambda: None))


def test_large_arrays_are_not_in_the_journal():
    found = packed({"large": np.zeros(ENTRY_LIMIT + 1, np.uint8), "small": np.float32([1, 2])})()
    told = unpacked(found, lambda: None)
    assert told["small"].tolist() == [1, 2]
    assert told["large"].shape == (ENTRY_LIMIT + 1,)
    assert isinstance(told["large"], Placeholder)


def test_a_recorded_array_is_a_copy():
    array = np.zeros(2)
    later = packed([array])
    array += 1
    assert later()[0].tolist() == [0, 0]


def test_the_error_is_public():
    assert strategies.SpareError is SpareError


@pytest.mark.parametrize("survives", [True, False])
def test_the_members_may_change_in_operations_that_can_be_repeated(survives):
    member = Member()
    journal, _ = journal_of(member)
    assert journal.perform(number(), lambda: member.changes, survives=survives) is survives
    assert not member.changes
    with pytest.raises(KeyError):
        journal.perform(number(), lambda: {}["nothing"], survives=survives)
    assert not member.changes


def test_a_worker_joins_only_between_operations_that_can_both_be_repeated():
    """Others may still be in the operation before, where a change of the members would end them."""
    member = Member()
    journal, _ = journal_of(member)
    for survives in (True, True, False, True, True):
        journal.perform(number(), lambda: 1, survives=survives)
    journal.begin_unrepeatable("prediction")
    for _ in range(2):
        journal.perform(number(), lambda: 1)
    assert member.begins_after == [False, True, False, True, False, True]
