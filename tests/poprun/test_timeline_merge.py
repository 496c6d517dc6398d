"""The merging of recordings: pairs, matches and the written trace."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from strict_trace import read_strictly
from timeline_jobs import MS, Made

from collectives.calls import Call
from collectives.instruments import DATA, EXCHANGE, FORWARD_BACKWARD, UPDATE, Instruments
from popdist.timeline import events as blocks
from popdist.timeline.events import EventKind
from popdist.timeline.spilling import TimelineFile as Recorded
from poprun.cli.log import Log
from poprun.errors import PopRunError, UsageError
from poprun.trace.aligned import align
from poprun.trace.command import folder_of, main, make_room, read_words, write_timeline
from poprun.trace.members import of_longest_period, periods_of
from poprun.trace.merging import merge, put_together, to_be_judged
from poprun.trace.recordings import of_newest_job, parse_recording, read_recordings, what_is_missing
from poprun.trace.report.page import report_page
from poprun.trace.report.text import findings, period_rows, report_text
from poprun.trace.report.verdict import judge
from poprun.trace.spans import Sort, spans_of
from poprun.trace.trace_events import write_trace


def header(**facts):
    usual = {"instance": 0, "instances": 1, "host": "h", "attempt": 0, "clock": "c", "began_ns": 0, "began_at_s": 0.0}
    return usual | facts


def record_steps(folder, instance, steps=3):
    """Record some steps with an instrument, as a file."""
    recorded = Recorded(folder / f"instance-{instance}.timeline", header(instance=instance, instances=2), 10**6)
    instruments = Instruments(recorded.recorder)
    call = Call("all_reduce", 'gradients "%s"', "sum", "float32", (4,))
    for step in range(steps):
        with instruments.during[DATA]:
            pass
        instruments.step_begins(step)
        with instruments.during[FORWARD_BACKWARD]:
            for part in range(2):
                instruments.replica_begins(2 * instance, 0)
                instruments.replica_ends(2 * instance, 0, part)
        with instruments.during[EXCHANGE]:
            instruments.operation_begins(step + 1, call)
            instruments.data_moves(16)
            instruments.operation_ends()
        with instruments.during[UPDATE]:
            pass
        instruments.step_ends(8, 1.0)
    recorded.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("recordings")
    for instance in range(2):
        record_steps(made, instance)
    return made


class TestATrace:
    @pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
    def test_the_trace_has_all_recorded_events(self, folder, tmp_path, name):
        job, counts = merge(folder, tmp_path / name)
        assert job.warnings == []
        events = read_strictly(tmp_path / name)
        kinds = Counter(event["ph"] for event in events)
        assert (kinds["X"], kinds["s"], kinds["f"], kinds["C"]) == (counts.spans, 3, 3, counts.counters)
        names = Counter(event["name"] for event in events if event["ph"] == "X")
        assert names == {
            "step": 6,
            **dict.fromkeys((DATA, FORWARD_BACKWARD, EXCHANGE, UPDATE), 6),
            "compute": 12,
            "all_reduce 'gradients \"%s\"': waiting for others": 6,
            "all_reduce 'gradients \"%s\"': exchange": 6,
        }
        said = {event["args"]["name"] for event in events if event["name"] in ("process_name", "thread_name")}
        assert {"instance 0 (h)", "instance 1 (h)", "replica 0", "replica 2", "communication"} <= said
        assert {event["name"] for event in events if event["ph"] == "C"} >= {"loss", "memory", "exchanged bytes"}

    def test_the_data_phase_belongs_to_the_step_that_uses_the_data(self, folder, tmp_path):
        merge(folder, tmp_path / "trace.json")
        events = read_strictly(tmp_path / "trace.json")
        steps = [event["args"]["step"] for event in events if event["name"] == DATA and event["pid"] == 0]
        assert steps == [0, 1, 2]

    def test_arrows_lead_from_the_last_instance_to_the_waiting_ones(self, tmp_path):
        job = put_together(Made(3, steps=5, compute_ms={1: 30}).recordings())
        write_trace(tmp_path / "trace.json", job.aligned, job.spans, job.meetings)
        events = read_strictly(tmp_path / "trace.json")
        assert {event["pid"] for event in events if event["ph"] == "s"} == {1}
        assert Counter(event["pid"] for event in events if event["ph"] == "f") == {0: 5, 2: 5}


class TestTruncatedRecordings:
    def test_a_recording_is_parsed_up_to_any_cut(self, folder, tmp_path):
        whole = (folder / "instance-0.timeline").read_bytes()
        steps = set()
        for length in range(0, len(whole), 7):
            recording = parse_recording(whole[:length])
            if recording is not None:
                assert not recording.is_complete
                steps.add(len(spans_of(recording).of(Sort.STEP)))
        assert steps == {0, 3}

    def test_a_truncated_recording_gives_a_trace(self, folder, tmp_path):
        whole = (folder / "instance-0.timeline").read_bytes()
        counts = []
        for length in range(0, len(whole) + 1, 61):
            recording = parse_recording(whole[:length])
            if recording is not None:
                job = put_together([recording])
                written = write_trace(tmp_path / "trace.json", job.aligned, job.spans, job.meetings)
                kinds = Counter(event["ph"] for event in read_strictly(tmp_path / "trace.json"))
                assert (kinds["X"], kinds["C"]) == (written.spans, written.counters)
                counts.append(written.spans)
        assert counts == sorted(counts)
        assert len(counts) > 5

    def test_a_truncated_recording_gets_a_warning(self, tmp_path, folder):
        whole = (folder / "instance-0.timeline").read_bytes()
        (tmp_path / "instance-0.timeline").write_bytes(whole[:-12])
        job, _ = merge(tmp_path, tmp_path / "trace.json")
        assert len(read_strictly(tmp_path / "trace.json")) > 20
        absent, cut = job.warnings
        assert absent == "instance 1 has no recording here; if it ran on another host, copy its file here"
        assert cut.startswith("instance 0 (h) did not come to its end")

    def test_open_spans_last_until_the_last_event(self):
        (recording,) = Made(1, steps=2).recordings()
        cut = replace(recording, events=recording.events[:6])
        spans = spans_of(cut).of(Sort.WAIT, Sort.PHASE, Sort.OPERATION)
        assert spans["failed"].any()
        assert np.all(spans["end_ns"] <= cut.events["when_ns"][-1])


class TestTheNewestJob:
    def test_the_newest_job_is_chosen_among_files_of_others(self):
        (one,) = Made(1).recordings()
        old = [replace(one, job="old", instance=number, began_at_s=number) for number in range(3)]
        new = [replace(one, job="new", instance=number, began_at_s=10 + number) for number in range(2)]
        assert of_newest_job([*old, *new]) == new

    def test_all_attempts_of_the_newest_job_are_included(self):
        (one,) = Made(1).recordings()
        attempts = [replace(one, job=f"job {number}", attempt=number, began_at_s=number) for number in range(3)]
        assert of_newest_job(attempts[::-1]) == attempts

    def test_a_folder_without_recordings_is_refused(self, tmp_path):
        with pytest.raises(PopRunError, match="there are no recordings in"):
            read_recordings(tmp_path)
        (tmp_path / "a.timeline").write_text("anything")
        with pytest.raises(PopRunError, match="is no recording"):
            read_recordings(tmp_path)


class TestClocks:
    def recordings(self, exchanges):
        first, second = Made(2, steps=4).recordings()
        events = second.events.copy()
        events["when_ns"] -= 5 * 10**9
        table = np.array(exchanges, np.int64).reshape(-1, 4)
        return [first, replace(second, clock="two", asked_clock="one", events=events, exchanges=table)]

    def test_clocks_are_aligned_by_exchanges(self):
        ahead, sent = 5 * 10**9, -5 * 10**9
        job = put_together(self.recordings([[sent, sent + ahead + 40_000, sent + ahead + 50_000, sent + 90_000]]))
        assert abs(job.aligned[1].ahead_ns - ahead) < 46_000
        assert job.warnings == []
        assert job.meetings.late_ns.max() < 3 * MS

    def test_a_clock_known_too_imprecisely_gets_a_warning(self):
        ahead, sent = 5 * 10**9, -5 * 10**9
        job = put_together(self.recordings([[sent, sent + ahead + 20 * MS, sent + ahead + 20 * MS, sent + 40 * MS]]))
        assert "its clock is known to 20" in job.warnings[0]

    def test_a_clock_that_was_never_compared_gets_a_warning(self):
        job = put_together(self.recordings([]))
        assert "has not compared its clock" in job.warnings[0]

    def test_clocks_are_aligned_without_the_recording_of_instance_0(self):
        ahead, sent = 5 * 10**9, -5 * 10**9
        second = self.recordings([[sent, sent + ahead + 40_000, sent + ahead + 50_000, sent + 90_000]])[1]
        third = replace(second, instance=2, clock="one", exchanges=np.zeros((0, 4), np.int64))
        aligned = put_together([second, third]).aligned
        assert [each.is_measured for each in aligned] == [True, True]
        assert abs(aligned[0].ahead_ns - ahead) < 46_000
        assert aligned[1].ahead_ns == 0

    def test_wall_clocks_are_used_if_the_reference_clock_is_not_recorded(self):
        """Instance 0 of a second attempt ran on another host."""
        first, second = self.recordings([])
        exchanges = np.array([[0, 40_000, 50_000, 90_000]])
        again = replace(second, attempt=1, asked_clock="three", exchanges=exchanges, began_at_s=100.0)
        (_, aligned) = align([first, again])
        assert not aligned.is_measured
        assert aligned.ahead_ns == 100e9

    def test_clocks_of_one_host_are_the_same(self):
        recordings = Made(2).recordings()
        assert [each.uncertainty_ns for each in align(recordings)] == [0, 0]


def test_only_steps_sampled_by_both_instances_are_matched():
    first, second = Made(2, steps=8).recordings()
    kinds = second.events["kind"]
    steps = np.cumsum(kinds == EventKind.STEP_BEGINS)
    always = np.isin(kinds, (EventKind.STEP_BEGINS, EventKind.STEP_ENDS, EventKind.MEASURED))
    kept = replace(second, events=second.events[always | (steps % 2 == 1)])
    assert put_together([first, kept]).meetings.step.tolist() == [0, 2, 4, 6]


def test_collectives_of_different_attempts_are_not_matched(tmp_path):
    first = Made(2, steps=4).recordings()
    again = [replace(each, attempt=1) for each in Made(2, steps=6, seed=1).recordings()]
    job = put_together([*first, *again])
    assert len(job.meetings.step) == 4 + 6
    assert set(job.meetings.took_part.sum(axis=1).tolist()) == {2}
    write_trace(tmp_path / "trace.json", job.aligned, job.spans, job.meetings)
    ends = {}
    for event in read_strictly(tmp_path / "trace.json"):
        if event["ph"] in "sf":
            ends.setdefault(event["id"], []).append(event["pid"] // 2)
    assert all(one == other for one, other in ends.values())


class TestLostEvents:
    def recording(self):
        """Return a recording that has lost its events from the middle of step 1 to the middle of step 3."""
        (recording,) = Made(1, steps=5).recordings()
        events = recording.events
        begins = np.flatnonzero(events["kind"] == EventKind.STEP_BEGINS)
        lost = np.zeros(1, events.dtype)
        lost["when_ns"], lost["kind"], lost["value"] = events["when_ns"][begins[3] + 2], EventKind.EVENTS_LOST, 77
        return replace(recording, events=np.concatenate([events[: begins[1] + 2], lost, events[begins[3] + 2 :]]))

    def test_lost_events_are_reported(self):
        assert "77 events could not be recorded" in what_is_missing([self.recording()])[0]

    def test_lost_events_leave_no_false_step(self):
        spans = spans_of(self.recording())
        assert spans.of(Sort.STEP)["step"].tolist() == [0, 4]
        ended = spans.of(Sort.PHASE, Sort.WAIT, Sort.TRANSFER)
        ended = ended[~ended["failed"]]
        assert np.all(ended["end_ns"] - ended["begin_ns"] < 15 * MS)

    def test_lost_events_are_marked_in_the_trace(self, tmp_path):
        job = put_together([self.recording()])
        write_trace(tmp_path / "trace.json", job.aligned, job.spans, job.meetings)
        names = [event["name"] for event in read_strictly(tmp_path / "trace.json") if event["ph"] == "i"]
        assert names == ["77 events could not be recorded"]


class TestAJobThatCarriedOn:
    """Instance 1 of three is lost after step 9, and instance 2, renumbered to 1, after step 39."""

    def recordings(self):
        number_of = {0: [0, 0], 2: [1]}
        whole = Made(3, steps=60, slow_link=(2, 0), link_ms=30, compute_ms={2: 14}).recordings()
        return [self.cut(each, number_of.get(each.instance, [])) for each in whole]

    def cut(self, recording, numbers):
        parts, begun = [], 0
        begins = np.flatnonzero(recording.events["kind"] == EventKind.STEP_BEGINS)
        for number, step in zip(numbers, (10, 40), strict=False):
            renumbered = recording.events[begins[step]][None].copy()
            renumbered["kind"], renumbered["value"] = EventKind.RENUMBERED, (number << 32) + 2
            parts += [recording.events[begun : begins[step]], renumbered]
            begun = begins[step]
        end = [10, 40, 60][len(numbers)]
        parts.append(recording.events[begun : begins[end] if end < 60 else None])
        events = np.concatenate(parts)
        if recording.instance == 0:  # after step 9, instance 2 has number 1
            waits = (events["kind"] == EventKind.WAITS_FOR) & (np.arange(len(events)) >= begins[10])
            events["value"][waits] = 1
        return replace(recording, events=events, is_complete=len(numbers) == 2)

    def test_the_longest_membership_is_judged(self):
        job = to_be_judged(self.recordings())
        assert [each.recording.instance for each in job.aligned] == [0, 2]
        assert job.warnings[0].startswith("instances 1, 2 were lost")
        assert "30 of 60 steps that instances 0, 2 made together" in job.warnings[0]
        assert not any("no recording" in warning for warning in job.warnings)
        verdict = judge(job)
        assert verdict.table.steps.tolist() == list(range(10, 40))
        assert (verdict.link.source, verdict.link.target) == (1, 0)
        assert "from instance 2 (host1) to instance 0 (host0)" in findings(verdict)[-1]

    def test_one_lost_instance_is_named_in_the_singular(self):
        first, last = Made(2, steps=60).recordings()
        _, (said,) = of_longest_period([self.cut(first, [0]), self.cut(last, [])])
        assert said.startswith("instance 1 was lost, and the others carried on")
        assert said.endswith("30 of 40 steps that instance 0 made")

    def test_a_lost_instance_without_recording_is_not_named(self):
        first, _, last = Made(3, steps=60).recordings()
        _, (said,) = of_longest_period([self.cut(first, [0]), self.cut(last, [1])])
        assert said.startswith("some instances were lost, and the others carried on")
        assert said.endswith("30 of 40 steps that instances 0, 2 made together")

    def test_the_trace_keeps_the_original_numbers_of_instances(self, tmp_path):
        job = put_together(self.recordings())
        write_trace(tmp_path / "trace.json", job.aligned, job.spans, job.meetings)
        names = Counter(event["name"] for event in read_strictly(tmp_path / "trace.json") if event["ph"] == "i")
        assert names["still waits for instance 2"] == 40
        assert names["carries on as instance 1 of 2 with replicas 3-5"] == 1

    def test_a_job_without_losses_is_judged_as_a_whole(self):
        whole = Made(2).recordings()
        assert of_longest_period(whole) == (whole, [])


def renumbered(recording, step, change, index, count):
    """Return an event just before a step that gives the instance a new number."""
    event = recording.events[recording.events["kind"] == EventKind.STEP_BEGINS][step : step + 1].copy()
    event["kind"], event["track"], event["value"] = EventKind.RENUMBERED, change, (index << 32) + count
    return event


class TestAJobWithASpare:
    """Spare 2 takes the place of instance 0 after step 9; after step 49 only instance 1 is wanted."""

    def recordings(self):
        first, other, spare = Made(3, steps=60).recordings()
        places = {10: (1, 2), 50: (2, 1)}  # by step: the number of the change, and the number of active instances
        indices = {1: {10: 1, 50: 0}, 2: {10: 0, 50: 0}}
        begins = np.flatnonzero(first.events["kind"] == EventKind.STEP_BEGINS)
        cut = [replace(first, events=first.events[: begins[10]], is_complete=False)]
        for each in (other, spare):
            parts = [each.events[: begins[10]] if each is other else np.empty(0, each.events.dtype)]
            for (step, (change, count)), end in zip(places.items(), (begins[50], None), strict=True):
                sleeps = each is spare and step == 50
                event = renumbered(each, step, change, indices[each.instance][step], 0 if sleeps else count)
                parts += [event, each.events[0:0] if sleeps else each.events[begins[step] : end]]
            cut.append(replace(each, events=np.concatenate(parts)))
        return [replace(each, instances=2, replicas=4) for each in cut]

    def test_the_report_shows_who_drove_which_replicas(self):
        job = to_be_judged(self.recordings())
        assert [each.recording.title for each in job.aligned] == ["instance 1 (host0)", "spare 2 (host1)"]
        assert job.warnings[0] == (
            "instance 0 was lost, spare 2 joined; this report covers the 40 of 60 steps that instance 1 and spare 2 "
            "made together"
        )
        assert judge(job).table.steps.tolist() == list(range(10, 50))
        assert period_rows(job) == [
            ["steps", "instance 0", "instance 1", "spare 2"],
            ["0-9", "0-1", "2-3", "-"],
            ["10-49", "-", "2-3", "0-1"],
            ["50-59", "-", "0-3", "-"],
        ]
        for shown in (report_text(job, judge(job)), report_page(job, judge(job))):
            assert "Replicas of each instance" in shown

    def test_the_trace_shows_when_a_spare_sleeps(self, tmp_path):
        job = put_together(self.recordings())
        write_trace(tmp_path / "trace.json", job.aligned, job.spans, job.meetings)
        events = read_strictly(tmp_path / "trace.json")
        drove = [(event["pid"], event["name"]) for event in events if event.get("cat") == "membership"]
        assert drove == [
            *[(1, name) for name in ("replicas 2-3", "replicas 2-3", "replicas 0-3")],
            *[(2, name) for name in ("spare", "replicas 0-1", "spare")],
        ]
        said = [event["name"] for event in events if event.get("cat") == "renumbered" and event["pid"] == 2]
        assert said == ["carries on as instance 0 of 2 with replicas 0-1", "sleeps as a spare"]

    def test_a_step_that_a_change_has_interrupted_counts_where_it_ends(self):
        (recording,) = Made(1, steps=3).recordings()
        begins = np.flatnonzero(recording.events["kind"] == EventKind.STEP_BEGINS)
        inside = begins[1] + 2
        events = [recording.events[:inside], renumbered(recording, 1, 1, 0, 1), recording.events[inside:]]
        periods = periods_of([replace(recording, events=np.concatenate(events))])
        assert [each.steps for each in periods] == [[0], [1, 2]]

    def test_a_spare_that_never_joins_is_left_out_of_the_report(self):
        first, other, spare = Made(3, steps=60).recordings()
        recordings = [first, other, replace(spare, events=spare.events[:0])]
        job = to_be_judged([replace(each, instances=2) for each in recordings])
        assert [each.recording.instance for each in job.aligned] == [0, 1]
        assert job.warnings == []
        assert len(judge(job).table.steps) == 60


def test_missing_instances_are_named():
    recordings = Made(4).recordings()
    assert what_is_missing(recordings) == []
    assert "instances 1, 2 have no recording" in what_is_missing([recordings[0], recordings[3]])[0]


class TestTheCommand:
    def test_merge_and_report_write_their_results(self, folder, tmp_path, capfd):
        assert main(["merge", str(folder), "-o", str(tmp_path / "a.json")]) == 0
        assert re.match(r"wrote 54 spans, 3 arrows and \d+ values to ", capfd.readouterr().out)
        assert main(["report", str(folder), "--html", str(tmp_path / "a.html")]) == 0
        assert capfd.readouterr().out.startswith("3 steps of 2 instances in ")
        assert (tmp_path / "a.html").read_text().endswith("</html>\n")

    def test_an_unwritable_file_is_refused(self, folder, tmp_path):
        with pytest.raises(PopRunError, match="cannot be written: No such file"):
            main(["merge", str(folder), "-o", str(tmp_path / "no" / "a.json")])

    def test_a_missing_recording_gets_a_warning(self, tmp_path, folder, capfd):
        (tmp_path / "instance-0.timeline").write_bytes((folder / "instance-0.timeline").read_bytes())
        main(["merge", str(tmp_path), "-o", str(tmp_path / "a.json")])
        assert capfd.readouterr().err.startswith("warning: instance 1 has no recording here")


class TestRecordingsOfAJob:
    def test_old_recordings_are_removed(self, tmp_path):
        make_room(str(tmp_path / "a.json"))
        old = tmp_path / "a.json.parts" / "instance-7.timeline"
        old.touch()
        make_room(str(tmp_path / "a.json"))
        assert not old.exists()

    def test_an_unusable_folder_is_refused(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(UsageError, match="recordings go to .*, which cannot be made"):
            make_room(str(tmp_path / "file" / "a.json"))

    @pytest.mark.parametrize(
        ("trace", "said"), [("a.json", "there is no timeline"), ("no/a.json", "cannot be written")]
    )
    def test_a_timeline_that_cannot_be_written_does_not_fail_the_job(self, tmp_path, folder, capfd, trace, said):
        if said == "cannot be written":
            shutil.copytree(folder, f"{tmp_path / trace}.parts")
            (tmp_path / trace).mkdir()
        write_timeline(str(tmp_path / trace), Log())
        assert said in capfd.readouterr().err


class TestWords:
    def test_the_folder_or_the_trace_beside_it_may_be_named(self, tmp_path):
        (tmp_path / "a.json.parts").mkdir()
        assert folder_of(str(tmp_path / "a.json")) == tmp_path / "a.json.parts"
        assert folder_of(str(tmp_path)) == tmp_path
        wanted = read_words(["merge", str(tmp_path), "-o", "x.json"])
        assert (wanted.folder, str(wanted.to)) == (tmp_path, "x.json")
        assert read_words(["merge", "--output=x.json", str(tmp_path)]) == wanted

    @pytest.mark.parametrize("words", [[], ["--help"], ["merge", "-h"], ["report", "--help"]])
    def test_help_is_shown_on_request(self, words, capfd):
        with pytest.raises(SystemExit, match="^0$"):
            read_words(words)
        assert "poprun timeline merge FOLDER" in capfd.readouterr().out

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["show"], "cannot 'show'; use merge or report"),
            (["merge", "a"], "name it with -o FILE"),
            (["merge", "a", "b", "-o", "c"], "needs one folder, 2 are named"),
            (["report", "-o", "c"], "poprun timeline report has no option --output"),
            (["-o", "c"], "cannot ''; use merge or report"),
        ],
    )
    def test_invalid_words_are_refused(self, words, message):
        with pytest.raises(UsageError, match=message):
            read_words(words)


def test_a_block_of_names_precedes_the_events_that_use_them(folder):
    known = set()
    for found in blocks.read_blocks((folder / "instance-1.timeline").read_bytes()):
        if found.kind == blocks.NAMES:
            known |= {number for number, _ in json.loads(found.content)}
        elif found.kind == blocks.EVENTS:
            events = blocks.unpack_events(found.content)
            named = events[
                np.isin(events["kind"], (EventKind.PHASE_BEGINS, EventKind.OPERATION_BEGINS, EventKind.MEASURED))
            ]
            assert set(named["name"].tolist()) <= known
