"""`PopDistStrategy` without a launcher in a process of its own, since a process joins once, and `LocalStrategy`.

`tests/jobs/test_promises.py` covers launchers, and `tests/jobs/test_survival_jobs.py` the loss of an instance.
"""

import json
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from losing import Lost
from surviving_instances import run_instances

import strategies
from strategies.core.survival import surviving
from strategies.strategy import StrategyExtended

HEAD = "import json, pytest, numpy as np, popdist, strategies\n"


@pytest.mark.complete
def test_a_popdist_strategy_without_a_launcher_has_every_role(in_new_process):
    program = (
        "strategy = strategies.PopDistStrategy()\n"
        "extended = strategy.extended\n"
        "print(json.dumps({\n"
        "    'leads': [extended.should_checkpoint, extended.should_save_summary],\n"
        "    'joined': popdist.isBackendInitialized(),\n"
        "    'same': [strategy.instance is popdist.instance(), strategy.communicator is popdist.communicator(),\n"
        "             strategy.progress is popdist.progress()],\n"
        "    'launcher': strategy.instance.launcher,\n"
        "    'streams': strategy.replicas.streams_gradients,\n"
        "    'carries on': strategy.can_carry_on,\n"
        "}))\n"
        "with pytest.raises(popdist.LifeCycleError, match='start it with poprun --on-failure shrink'):\n"
        "    strategy.carry_on()\n"
        "assert strategy.communicator is popdist.communicator()\n"
    )
    # Under `poprun --on-failure shrink` a single instance has no survivors.
    assert json.loads(in_new_process(HEAD + program, POPDIST_SHRINKS="1")) == {
        "leads": [True, True],
        "joined": True,
        "same": [True, True, True],
        "launcher": "single",
        "streams": False,
        "carries on": False,
    }


@pytest.mark.complete
def test_a_popdist_strategy_drives_the_replicas_of_popdist_init(in_new_process):
    """With `add_ipu_cross_replica_reductions=False`, values stay as they are, but only inside `run`."""
    program = (
        "popdist.init(3)\n"
        "found = {}\n"
        "for reduces in (True, False):\n"
        "    strategy = strategies.PopDistStrategy(add_ipu_cross_replica_reductions=reduces)\n"
        "    own = strategy.per_replica(lambda r: np.float32(r + 1))\n"
        "    inside = strategy.run(lambda x: strategies.get_replica_context().all_reduce('sum', x), args=(own,))\n"
        "    found[str(reduces)] = [list(map(float, inside)), float(strategy.reduce('sum', own))]\n"
        "print(json.dumps(found))\n"
    )
    assert json.loads(in_new_process(HEAD + program)) == {"True": [[6, 6, 6], 6], "False": [[1, 2, 3], 6]}


# ---- the strategy of one process that drives all replicas


def test_the_name_of_the_original_is_the_local_strategy():
    assert strategies.IPUStrategy is strategies.LocalStrategy


def test_a_local_strategy_is_the_only_instance_with_all_replicas():
    strategy = strategies.LocalStrategy(num_replicas=3)
    assert (strategy.num_instances, strategy.instance_index, strategy.num_replicas_in_sync) == (1, 0, 3)
    assert strategy.local_replicas == range(3)
    assert not strategy.can_carry_on
    assert not strategy.replicas.streams_gradients


def test_a_local_strategy_writes_files_and_makes_variables():
    extended = strategies.LocalStrategy().extended
    assert (extended.should_checkpoint, extended.should_save_summary) == (True, True)
    assert (extended.experimental_between_graph, extended.experimental_should_init) == (True, True)


def test_reductions_cover_the_replicas_of_the_strategy():
    strategy = strategies.LocalStrategy(3)
    values = strategy.per_replica(lambda replica: np.float32(replica + 1))
    assert (float(strategy.reduce("sum", values)), float(strategy.reduce("mean", values))) == (6, 2)


@pytest.mark.parametrize(("number", "error"), [(0, ValueError), (-2, ValueError), (1.5, TypeError)])
def test_fewer_than_one_replica_is_refused(number, error):
    with pytest.raises(error, match="num_replicas"):
        strategies.LocalStrategy(number)


# ---- the role of an instance, in the terms of programs of the original


def role(strategy):
    extended = strategy.extended
    return extended.should_checkpoint, extended.should_save_summary


def test_every_instance_runs_the_program_and_makes_its_variables():
    for writes in (False, True):
        extended = StrategyExtended(
            should_checkpoint=writes, should_save_summary=writes, _reduce=lambda op, value: value
        )
        assert (extended.experimental_between_graph, extended.experimental_should_init) == (True, True)


def test_roles_are_read_only():
    extended = strategies.LocalStrategy().extended
    with pytest.raises(FrozenInstanceError):
        extended.should_checkpoint = False


def test_the_next_instance_takes_the_role_of_a_lost_first_one():
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
