"""Records of instances: their combination and their first difference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from popdist.records.recording import LOSS, OPTIMIZER, Question
from poprun.errors import PopRunError
from poprun.verify.comparison import (
    STEPS,
    Distance,
    RunDifference,
    are_same,
    earliest,
    first_difference,
    first_inside,
    first_of_metrics,
)
from poprun.verify.explanation import advice, describe_metrics
from poprun.verify.records import BATCH, FINGERPRINT, GRADIENTS, METRICS, START, UPDATE, Record, read_record, record_of
from poprun.verify.report import RunOutcome, describe_difference, describe_success, draw_table
from poprun.verify.running import Run

NAMES = ("['b']", "['w']")


def process(instance: int = 0, instances: int = 1, **changed) -> tuple[int, dict]:
    line = {
        "kind": "process",
        "instance": instance,
        "instances": instances,
        "replicas": 4,
        "strategy": "PopDistStrategy",
        "host": "here",
        "versions": {"jax": "0.10.2"},
        "cpu": {"model": "Big", "vectors": "avx2", "features_crc32": "00"},
        "device": "cpu",
        "settings": {},
        "program_sha256": None,
    }
    return instance, line | changed


def layout(instance: int = 0, training: int = 0) -> tuple[int, dict]:
    return instance, {"kind": "layout", "training": training, "variables": NAMES, "batch": ["['x']"]}


def step(number: int, instance: int = 0, replicas: tuple[int, int] = (0, 4), training: int = 0, **changed):
    """Return the line of a step; its default values depend only on the number of the step."""
    line = {
        "kind": "step",
        "training": training,
        "step": number,
        "replicas": replicas,
        "batch": [[f"x{number}of{replica}" for replica in range(*replicas)]],
        "start": [f"v{number}{name}" for name in NAMES] if number == 0 else None,
        "gradients": [f"g{number}{name}" for name in NAMES],
        "random": {},
        "metrics": {"loss": f"l{number}"},
        "variables": [f"v{number + 1}{name}" for name in NAMES],
        "fingerprint": f"f{number}",
        "recording_s": 0.5,
    }
    return instance, line | changed


def record(*lines: tuple[int, dict]) -> Record:
    return record_of([process(), layout(), *lines], Path())


def steps(count: int, **changed) -> list:
    """Return lines for `count` steps; `changed` applies to the one before the last."""
    return [step(number, **(changed if number == count - 2 else {})) for number in range(count)]


PLAIN = record(*steps(4))


class TestTheRecord:
    def test_the_record_has_the_steps_of_all_instances(self):
        of_two = record_of(
            [
                process(0, 2),
                layout(0),
                step(0, 0, (0, 2)),
                step(1, 0, (0, 2)),
                process(1, 2),
                layout(1),
                step(0, 1, (2, 4)),
                step(1, 1, (2, 4)),
            ],
            Path(),
        )
        assert [each.instance for each in of_two.processes] == [0, 1]
        assert list(of_two.steps) == [(0, 0), (0, 1)]
        assert of_two.steps[0, 1].parts[BATCH]["['x'] of replica 3"] == {"x1of3": (1,)}
        assert of_two.steps[0, 1].parts[UPDATE]["['w']"] == {"v2['w']": (0, 1)}
        assert of_two.recording_s == 1.0
        assert first_difference(record(step(0), step(1)), of_two) is None

    def test_the_record_knows_the_variables_before_each_step(self):
        assert PLAIN.steps[0, 2].parts[START] == {"['b']": {"v2['b']": (0,)}, "['w']": {"v2['w']": (0,)}}

    def test_the_record_ends_with_the_last_step(self):
        assert PLAIN.last_fingerprint == "f3"
        assert Record().last_fingerprint == ""
        assert PLAIN.steps_until((0, 2)) == 3
        assert PLAIN.steps_until((0, 9)) == 4

    def test_the_record_is_read_from_the_files_of_all_processes(self, tmp_path):
        text = "\n".join(json.dumps(line) for _, line in [process(), layout(), *steps(2)])
        (tmp_path / "here.1.jsonl").write_text(text)
        assert read_record(tmp_path).steps == record(*steps(2)).steps
        assert read_record(tmp_path, [tmp_path / "here.1.jsonl"]) == Record()

    def test_a_record_may_end_within_a_line(self, tmp_path):
        lines = [json.dumps(line) for _, line in [process(), layout(), *steps(2)]]
        (tmp_path / "here.1.jsonl").write_text("\n".join(lines)[:-20])
        assert list(read_record(tmp_path).steps) == [(0, 0)]

    def test_a_record_damaged_elsewhere_is_refused(self, tmp_path):
        (tmp_path / "here.1.jsonl").write_text('{"kind"\n{}')
        with pytest.raises(PopRunError, match=r"here\.1\.jsonl is damaged in line 1"):
            read_record(tmp_path)

    def test_a_resumed_run_gives_one_record(self):
        began_anew = step(2, start=[f"v2{name}" for name in NAMES])
        resumed = record(step(0), step(1), step(2), process(), layout(), began_anew, step(3))
        assert first_difference(PLAIN, resumed) is None

    def test_an_instance_that_went_on_alone_is_compared(self):
        shrunk = record_of(
            [
                process(0, 2),
                layout(0),
                step(0, 0, (0, 2)),
                process(1, 2),
                layout(1),
                step(0, 1, (2, 4)),
                step(1, 1, (0, 4)),
            ],
            Path(),
        )
        assert first_difference(record(step(0), step(1)), shrunk) is None
        assert shrunk.last_fingerprint == "f1"


CHANGES = [
    (START, {"start": ["other", "v2['w']"]}, ("['b']",)),
    (BATCH, {"batch": [["x2of0", "other", "x2of2", "other"]]}, ("['x'] of replica 1", "['x'] of replica 3")),
    (GRADIENTS, {"gradients": ["g2['b']", "other"]}, ("['w']",)),
    (UPDATE, {"variables": ["other", "other"]}, NAMES),
    (FINGERPRINT, {"fingerprint": "other"}, ("",)),
]


class TestTheFirstDifference:
    def test_equal_runs_have_no_difference(self):
        assert first_difference(PLAIN, record(*steps(4))) is None
        assert first_inside(PLAIN) is None

    @pytest.mark.parametrize(("part", "changed", "names"), CHANGES)
    def test_the_first_difference_names_step_and_part(self, part, changed, names):
        assert first_difference(PLAIN, record(*steps(4, **changed))) == RunDifference((0, 2), part, names)

    def test_the_earliest_of_several_parts_is_named(self):
        changed = {key: value for _, change, _ in CHANGES[2:] for key, value in change.items()}
        found = first_difference(PLAIN, record(*steps(4, **changed)))
        assert found is not None
        assert found.part == GRADIENTS

    def test_metrics_are_not_compared_because_their_bits_are_not_promised(self):
        one = record(*steps(4, metrics={"loss": (1.0).hex(), "right": (0.5).hex()}))
        other = record(*steps(4, metrics={"loss": (1.0 + 2**-23).hex(), "right": (0.5).hex()}))
        assert first_difference(one, other) is None
        found = first_of_metrics(one, other)
        assert found == RunDifference((0, 2), METRICS, ("loss",))
        assert (
            "metrics of 2 x 2 have different bits from step 2 on, loss by 1 unit in the last place"
            in describe_metrics(found, one, other, "2 x 2")
        )
        assert first_of_metrics(one, one) is None
        assert first_of_metrics(record(*steps(2)), record(*steps(3))) is None

    def test_a_different_number_of_steps_is_a_difference(self):
        for one, other in ((4, 5), (5, 4)):
            assert first_difference(record(*steps(one)), record(*steps(other))) == RunDifference((0, 4), STEPS)

    def test_instances_of_one_run_are_compared(self):
        lines = [process(0, 2), layout(0), step(0, 0, (0, 2)), process(1, 2), layout(1)]
        torn = record_of([*lines, step(0, 1, (2, 4), variables=["v1['b']", "other"])], Path())
        inside = RunDifference((0, 0), UPDATE, ("['w']",), (0, 1), is_inside=True)
        assert first_inside(torn) == first_difference(record(step(0)), torn) == inside

    def test_alternating_trainings_are_compared_in_time_order(self):
        lines = [layout(0, 1), step(0), step(0, training=1), step(1), step(1, training=1)]
        changed = [*lines[:2], step(0, training=1, gradients=["a", "b"]), step(1, gradients=["a", "b"]), lines[4]]
        found = first_difference(record(*lines), record(*changed))
        assert found == RunDifference((1, 0), GRADIENTS, NAMES)

    def test_the_earliest_difference_of_many_runs_is_found(self):
        found = [None, RunDifference((0, 3), BATCH), RunDifference((0, 2), UPDATE), RunDifference((0, 2), GRADIENTS)]
        assert earliest(PLAIN, found) == 3
        assert earliest(PLAIN, [None, None]) is None


def test_two_runs_are_the_same_if_their_instances_differ_alike():
    lines = [process(0, 2), layout(0), step(0, 0, (0, 2)), process(1, 2), layout(1)]
    torn = record_of([*lines, step(0, 1, (2, 4), variables=["v1['b']", "other"])], Path())
    assert are_same(torn, torn, (0, 0))
    assert not are_same(torn, record(step(0)), (0, 0))
    assert are_same(PLAIN, record(*steps(4, gradients=["other", "other"])), (0, 1))


class TestAdvice:
    def of(self, part: str, one: Record = PLAIN, other: Record = PLAIN, is_repeatable: bool | None = True) -> str:
        return advice(RunDifference((0, 2), part), one, other, is_repeatable)

    @pytest.mark.parametrize(
        ("part", "said"),
        [
            (START, "changes of the variables between two steps"),
            (BATCH, "the source of the batch"),
            (GRADIENTS, "what the loss function reads besides its arguments"),
            (UPDATE, "a learning rate that depends on the time"),
            (STEPS, "the reason for the number of steps"),
        ],
    )
    def test_every_part_has_an_advice(self, part, said):
        assert said in self.of(part)

    def test_the_first_variables_have_their_own_advice(self):
        assert "the source of the first variables" in advice(RunDifference((0, 0), START), PLAIN, PLAIN)

    def test_a_query_in_the_loss_function_is_named_if_gradients_differ(self):
        asked = Record(
            steps=PLAIN.steps,
            questions=(
                Question("popdist.getNumInstances", "a.py", 1),
                Question("strategy.instance_index", "a.py", 9, LOSS),
            ),
        )
        assert self.of(GRADIENTS, asked).startswith("strategy.instance_index at a.py:9, in the loss function: ")
        assert self.of(BATCH, asked).startswith("popdist.getNumInstances at a.py:1: ")
        asked = Record(steps=PLAIN.steps, questions=(Question("strategy.num_instances", "a.py", 3, OPTIMIZER),))
        assert "a.py:3, in the optimizer" in self.of(UPDATE, asked)

    def test_an_unrepeatable_run_does_not_blame_the_instance_index(self):
        asked = Record(PLAIN.processes, PLAIN.steps, (Question("strategy.instance_index", "a.py", 9, LOSS),))
        said = self.of(GRADIENTS, asked, is_repeatable=False)
        assert "a.py" not in said
        assert "different bits each time" in said

    def test_a_global_generator_in_another_state_is_named(self):
        used = [record(*steps(4, random={"numpy.random": state})) for state in ("1", "2")]
        assert "numpy.random: its global generator was used" in self.of(BATCH, *used)
        assert "numpy.random: " not in self.of(BATCH, used[0], used[0])

    def test_different_machines_are_named(self):
        other = record_of(
            [process(cpu={"model": "Small", "vectors": "", "features_crc32": "1"}), layout(), *steps(4)], Path()
        )
        assert "CPU differs, 'Big' and 'Small'" in self.of(GRADIENTS, PLAIN, other)

    def test_the_lack_of_a_promise_with_horovod_is_explained(self):
        other = record_of([process(strategy="IPUHorovodStrategy"), layout(), *steps(4)], Path())
        assert "promises closeness" in self.of(GRADIENTS, PLAIN, other)


class TestTheReport:
    def test_the_table_has_a_row_for_each_run(self):
        other = record(*steps(4, gradients=["other", "other"], fingerprint="other"))
        outcomes = [
            RunOutcome(Run(1, 4), PLAIN),
            RunOutcome(Run(2, 4), PLAIN),
            RunOutcome(Run(4, 4, "ring"), other, difference=first_difference(PLAIN, other)),
            RunOutcome(Run(2, 4, faults=("kill:instance=1",)), PLAIN, exit_status=3),
        ]
        assert draw_table(outcomes).splitlines() == [
            "run  instances x replicas  how                   steps  fingerprint  result",
            "1    1 x 4                 -                     4      f3           first",
            "2    2 x 2                 mpi                   4      f3           equal",
            "3    4 x 1                 ring                  4      f3           differs from step 2 on: gradients",
            "4    2 x 2                 mpi, kill:instance=1  4      f3           failed with exit status 3",
        ]

    def test_the_size_of_a_difference_is_shown(self):
        difference = RunDifference((0, 2), GRADIENTS, NAMES)
        distances = [("['b']", Distance(1, 1, 1)), ("['w']", Distance(7, 64, 1234)), ("['z']", Distance(1, 2, None))]
        assert describe_difference(difference, ("1 x 4", "2 x 2"), distances, "").splitlines() == [
            "1 x 4 and 2 x 2 differ first at step 2 (counted from 0), in the gradients:",
            "  name   elements that differ  largest difference",
            "  ['b']  1 of 1                1 unit in the last place",
            "  ['w']  7 of 64               1,234 units in the last place",
            "  ['z']  1 of 2                not a number of units",
            "Equal until then, and in that step: the variables before it, batch.",
        ]

    def test_both_instances_of_a_run_are_named(self):
        inside = RunDifference((1, 2), UPDATE, NAMES, (0, 3), is_inside=True)
        said = describe_difference(inside, ("4 x 1", "4 x 1"), [("['b']", "")], "(not repeated)")
        assert said.startswith(
            "instances 0 and 3 of 4 x 1 differ first at step 2 of training 1 (counted from 0), in the"
        )
        assert "\n  ['b']\n(not repeated)\n" in said

    def test_only_a_dozen_of_many_names_are_shown(self):
        names = [(f"w{number}", Distance(1, 1, 1)) for number in range(40)]
        said = describe_difference(RunDifference((0, 0), UPDATE), ("a", "b"), names, "")
        assert "w11" in said
        assert "... and 28 more" in said
        assert "w12" not in said

    def test_equal_runs_give_the_fingerprint(self):
        said = describe_success([RunOutcome(Run(1, 4), PLAIN), RunOutcome(Run(2, 4), PLAIN)])
        assert said.startswith("equal: 2 runs of 4 steps")
        assert said.endswith("variables f3")
