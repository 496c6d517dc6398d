"""`PopDistStrategy` without a launcher, in a process of its own: what `popdist.init` has joined, a process joins once.

With launchers: `tests/jobs/test_promises.py`, and when an instance is lost: `tests/jobs/test_survival_jobs.py`.
"""

import json

import pytest

HEAD = "import json, pytest, numpy as np, popdist, strategies\n"


@pytest.mark.complete
def test_it_is_the_only_instance_and_has_every_role(in_new_process):
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
    # As under `poprun --on-failure shrink`: who is alone has nobody who could go on.
    assert json.loads(in_new_process(HEAD + program, POPDIST_SHRINKS="1")) == {
        "leads": [True, True],
        "joined": True,
        "same": [True, True, True],
        "launcher": "single",
        "streams": False,
        "carries on": False,
    }


@pytest.mark.complete
def test_it_drives_the_replicas_for_which_popdist_was_initialised(in_new_process):
    """And leaves values as they are where it was told so: inside of `run` only."""
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
