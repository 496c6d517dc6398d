"""Faults in `popdist.launch`: strangers, results of other instances or attempts, and other modules."""

from __future__ import annotations

from fault import Fault

_PARTS = "tests/popdist/test_launching.py::"
_CHANNEL = "popdist/launching/channel.py"
_REPORTS = "popdist/launching/reports.py"

IN_LAUNCHES = (
    Fault(
        name="a caller without the token gets the function",
        path=_CHANNEL,
        old="prove(token, _INSTANCE, challenge + own)):",
        new="proof):",
        caught_by=f"{_PARTS}test_a_caller_without_the_token_gets_only_the_challenge[another]",
    ),
    Fault(
        name="the challenge is the same for every caller",
        path=_CHANNEL,
        old="challenge = os.urandom(RANDOM_BYTES)",
        new="challenge = bytes(RANDOM_BYTES)",
        caught_by=f"{_PARTS}test_a_proof_cannot_be_used_again_or_sent_back",
    ),
    Fault(
        name="an instance takes a function from any process",
        path=_CHANNEL,
        old='prove(token, _LAUNCHER, challenge + own)):\n        raise ConnectionRefusedError("the process at',
        new='proof):\n        raise ConnectionRefusedError("the process at',
        caught_by=f"{_PARTS}test_an_instance_takes_nothing_from_a_false_launcher",
    ),
    Fault(
        name="results are in the order in which they came",
        path=_REPORTS,
        old="sorted(by_place.items(), key=lambda item: item[0])",
        new="by_place.items()",
        caught_by=f"{_PARTS}test_results_come_in_the_order_of_the_instances",
    ),
    Fault(
        name="a result of an instance with a new number replaces one of an instance that returned earlier",
        path=_REPORTS,
        old="(-each.sender.count, each.sender.index)",
        new="(0, each.sender.index)",
        caught_by=f"{_PARTS}test_a_job_that_goes_on_without_lost_instances_returns_the_other_results",
    ),
    Fault(
        name="a result from before a restart is returned",
        path=_REPORTS,
        old=" and each.sender.attempt == last",
        new="",
        caught_by=f"{_PARTS}test_only_results_of_the_last_attempt_count",
    ),
    Fault(
        name="an instance prefers an installed module to the launching program's own",
        path="popdist/launched.py",
        old='[*described["path"], *sys.path]',
        new='[*sys.path, *described["path"]]',
        caught_by="tests/jobs/test_launched_functions.py::test_a_script_gets_results_and_exceptions_of_its_own_classes",
    ),
)
