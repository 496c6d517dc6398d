"""Threads that execute a timetable: their waits, and their common end."""

import itertools
import threading

import pytest

from strategies.pipelines.running.driver import AbandonedError, ScheduleGraph, ScheduleRunner
from strategies.pipelines.timetable import SCHEDULES, ActionKind, StageAction, placed

MAPPINGS = {
    "chain": [0, 1, 2, 3],
    "there and back": [0, 1, 1, 0],
    "one": [0, 0, 0, 0],
    "a stage on two": [0, [0, 1], 1],
}


def timetables():
    for (name, schedule), (word, mapping) in itertools.product(sorted(SCHEDULES.items()), MAPPINGS.items()):
        if name != "interleaved" or word == "chain":
            yield pytest.param(schedule.timetable(placed(mapping), 8, True), id=f"{name}, {word}")


def follow(runner, devices, perform, **options):
    """Return the errors of all drivers, each run in its own thread."""
    errors = [None] * devices

    def one(device):
        try:
            runner.follow(device, perform, **options)
        except BaseException as error:
            errors[device] = error

    threads = [threading.Thread(target=one, args=(device,)) for device in range(devices)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return errors


@pytest.mark.parametrize("timetable", list(timetables()))
def test_an_action_begins_after_all_its_dependencies(timetable):
    parts = {action: len(set(timetable.mapping[action.stage])) for actions in timetable.devices for action in actions}
    lock = threading.Lock()

    def perform(device, action):
        with lock:
            assert not [one for one in timetable.dependencies(action) if parts[one]]
            parts[action] -= 1

    runner = ScheduleRunner(ScheduleGraph.of(timetable))
    assert follow(runner, len(timetable.devices), perform) == [None] * len(timetable.devices)
    assert not any(parts.values())
    for device, actions in enumerate(timetable.devices):
        assert [span.action for span in runner.spans if span.device == device] == list(actions)


def test_a_single_device_never_waits():
    schedule_graph = ScheduleGraph.of(SCHEDULES["grouped"].timetable(placed([0, 0]), 4, True))
    assert not any(schedule_graph.needs)


def test_times_are_measured_by_the_clock_from_the_start():
    timetable = SCHEDULES["sequential"].timetable(placed([0, 0]), 1, False)
    runner = ScheduleRunner(ScheduleGraph.of(timetable), 10.0, itertools.count(11).__next__)
    runner.follow(0, lambda device, action: None)
    assert [(span.begin_s, span.end_s) for span in runner.spans] == [(1, 2), (3, 4)]


@pytest.mark.parametrize("timetable", list(timetables()))
def test_all_drivers_end_when_one_fails(timetable):
    bad = StageAction(ActionKind.FORWARD, 1, 3)

    def perform(device, action):
        if action == bad:
            raise ArithmeticError("no")

    errors = follow(ScheduleRunner(ScheduleGraph.of(timetable)), len(timetable.devices), perform)
    assert all(error is None or isinstance(error, ArithmeticError | AbandonedError) for error in errors)
    assert [type(errors[device]) for device in set(timetable.mapping[1])].count(ArithmeticError) >= 1


def test_waiting_drivers_end_on_give_up():
    timetable = SCHEDULES["grouped"].timetable(placed([0, 1]), 4, False)
    begun = threading.Event()

    def perform(device, action):
        begun.set()
        stopped.wait(60)

    stopped = threading.Event()
    runner = ScheduleRunner(ScheduleGraph.of(timetable))

    def stop():
        begun.wait(60)
        runner.give_up()
        stopped.set()

    stopper = threading.Thread(target=stop)
    stopper.start()
    errors = follow(runner, 2, perform)
    stopper.join()
    assert [type(error) for error in errors] == [AbandonedError] * 2
    assert "device 1 gives up before the forward of stage 1 for micro-batch 0" in str(errors[1])


def test_short_actions_that_wait_for_each_other_run_at_once():
    """Short actions run one at a time; a thread that was not woken therefore looks itself whether its turn has come."""
    timetable = SCHEDULES["grouped"].timetable(placed([0, 1]), 4, False)
    is_first_done = threading.Event()

    def perform(device, action):
        if (device, action.micro_batch) == (0, 1):
            assert is_first_done.wait(60)
        if (device, action.micro_batch) == (1, 0):
            is_first_done.set()

    runner = ScheduleRunner(ScheduleGraph.of(timetable), clock=lambda: 0.0)
    assert follow(runner, 2, perform) == [None] * 2


class Gate:
    """A gate that knows the threads inside."""

    def __init__(self):
        self.inside = set()

    def __enter__(self):
        self.inside.add(threading.get_ident())

    def __exit__(self, *error):
        self.inside.remove(threading.get_ident())


def test_actions_run_and_are_timed_inside_the_gate_that_limits_their_number():
    timetable = SCHEDULES["grouped"].timetable(placed(MAPPINGS["chain"]), 8, True)
    gate, done = Gate(), []

    def clock():
        assert threading.get_ident() in gate.inside
        return 0.0

    def perform(device, action):
        assert threading.get_ident() in gate.inside
        done.append(action)

    assert follow(ScheduleRunner(ScheduleGraph.of(timetable), clock=clock), 4, perform, at_once=gate) == [None] * 4
    assert (len(done), gate.inside) == (sum(map(len, timetable.devices)), set())
