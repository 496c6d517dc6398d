"""The role of an instance, as programs written for the original ask for it."""

from dataclasses import FrozenInstanceError

import pytest
from losing import Lost
from surviving_instances import run_instances

import strategies
from strategies.extended import StrategyExtended
from strategies.replicas.membership import surviving


def role(strategy):
    extended = strategy.extended
    return extended.should_checkpoint, extended.should_save_summary


def test_every_instance_runs_the_program_and_makes_its_variables_whoever_writes_files():
    for writes in (False, True):
        extended = StrategyExtended(
            should_checkpoint=writes, should_save_summary=writes, _reduce=lambda op, value: value
        )
        assert (extended.experimental_between_graph, extended.experimental_should_init) == (True, True)


def test_nobody_changes_a_role_by_writing_into_it():
    extended = strategies.IPUStrategy().extended
    with pytest.raises(FrozenInstanceError):
        extended.should_checkpoint = False


def test_when_the_first_instance_is_lost_the_next_one_has_its_role():
    def function(strategy):
        before = role(strategy)

        def attempt():
            if strategy.replicas.first_index == 0:
                raise Lost
            strategy.communicator.barrier()
            return before, role(strategy)

        return surviving(strategy.replicas, attempt, lambda: None)

    writer, other = (True, True), (False, False)
    assert run_instances(3, 6, function) == [None, (other, writer), (other, other)]
