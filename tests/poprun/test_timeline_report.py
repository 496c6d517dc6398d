"""The report about a timeline: the blamed instances and links, and the page."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from timeline_jobs import Made

from popdist.timeline.events import EventKind
from poprun.cli.wording import time_text
from poprun.errors import PopRunError
from poprun.trace.command import main
from poprun.trace.merging import put_together
from poprun.trace.report.findings import Cause
from poprun.trace.report.page import draw_curves, report_page
from poprun.trace.report.step_table import bubbles_of, inside_ns, table_of
from poprun.trace.report.text import findings, paths, report_text
from poprun.trace.report.verdict import judge
from poprun.trace.spans import SPAN

SIZES = [2, 3, 4]


def verdict_of(made):
    return judge(put_together(made.recordings()))


class TestALateInstance:
    @pytest.mark.parametrize("instances", SIZES)
    @pytest.mark.parametrize(
        ("wrong", "cause"),
        [
            ({"compute_ms": {1: 14}}, Cause.COMPUTE),
            ({"input_ms": {1: 5}}, Cause.INPUT),
            ({"compute_ms": {1: 14}, "core_wait_ms": {1: 3.8}}, Cause.HOST),
        ],
        ids=lambda value: value.name if isinstance(value, Cause) else "",
    )
    def test_a_late_instance_is_named_with_the_cause(self, seed, instances, wrong, cause):
        verdict = verdict_of(Made(instances, seed=seed, **wrong))
        culprit = verdict.culprit
        assert (culprit.instance, culprit.cause) == (1, cause)
        assert culprit.last_share > 0.9
        assert culprit.explained > 0.9
        assert verdict.changes[0].what.startswith("instance 1 is late")
        assert verdict.link is None

    @pytest.mark.parametrize("slower", [1.5, 2, 3])
    def test_a_late_instance_costs_its_distance_from_the_second_slowest(self, slower):
        made = Made(3, compute_ms={2: 10 * slower}, jitter=0.0)
        culprit = verdict_of(made).culprit
        lasted_ms = 10 * slower + 0.2 + 1 + 1.02 + 0.03
        assert culprit.gain == pytest.approx(10 * (slower - 1) / lasted_ms, rel=0.05)
        assert culprit.late_s == pytest.approx(0.01 * (slower - 1), rel=0.02)

    @pytest.mark.parametrize("instances", SIZES)
    def test_time_between_steps_is_explained_by_the_line_of_the_program(self, seed, instances):
        verdict = verdict_of(Made(instances, between_ms={1: 14}, seed=seed))
        culprit = verdict.culprit
        assert (culprit.instance, culprit.cause, culprit.line) == (1, Cause.BETWEEN, "train.py:12")
        assert culprit.explained > 0.9
        assert "The reason is your code between its steps, mostly at train.py:12, which" in findings(verdict)[0]
        assert verdict.changes[0].what == "instance 1 is late: do less in its loop, at train.py:12"
        assert verdict.shares[1]["between"] == pytest.approx(14 / 26.2, rel=0.1)
        assert verdict.shares[0]["between"] == pytest.approx(0, abs=0.01)
        assert paths(verdict)[0][1].startswith("your code between steps on instance 1 ")

    def test_a_single_pause_between_steps_is_reported_for_that_step(self):
        (said,) = findings(verdict_of(Made(2, pauses_ms={(1, 20): 300}, jitter=0.0)))
        assert said.endswith("instance 1 (host0) needed 300 ms longer for your code between steps.")

    def test_time_outside_of_all_phases_has_the_cause_rest(self):
        """The instance is late, and its events of the phase are missing."""
        recordings = Made(2, compute_ms={1: 20}).recordings()
        table = table_of(put_together(recordings))
        hidden = replace(recordings[1], names={**recordings[1].names, 1: {"name": "something else"}})
        assert table.of["compute"][1].min() > table.of["compute"][0].max()
        culprit = judge(put_together([recordings[0], hidden])).culprit
        assert culprit.cause is Cause.REST

    @pytest.mark.parametrize(("steps", "is_named"), [(10, False), (60, True)])
    def test_an_instance_is_named_only_if_chance_is_excluded(self, steps, is_named):
        """In eight counted steps, one of two instances is always last by chance with a probability of 1/128."""
        assert bool(verdict_of(Made(2, steps=steps, compute_ms={1: 14})).culprit) == is_named

    @pytest.mark.parametrize("instances", SIZES)
    def test_an_instance_that_was_late_once_is_an_outlier(self, instances):
        verdict = verdict_of(Made(instances, delays_ms={(1, 20): 300}))
        assert verdict.culprit is None
        (outlier,) = verdict.outliers
        assert (outlier.step, outlier.instance, outlier.category) == (20, 1, "compute")
        assert outlier.longer_s == pytest.approx(0.3, rel=0.05)
        assert "Step 20 took" in findings(verdict)[0]


def test_a_long_step_without_a_single_reason_is_reported_so():
    verdict = verdict_of(Made(3, delays_ms={(1, 20): 300}))
    (outlier,) = verdict.outliers
    shared = replace(verdict, outliers=[replace(outlier, longer_s=0.1)])
    (said,) = findings(shared)
    assert re.fullmatch(r"Step 20 took 31\d ms instead of 1\d(\.\d)? ms; no single recorded reason explains it\.", said)


class TestAHealthyJob:
    @pytest.mark.parametrize("instances", [1, *SIZES, 8])
    @pytest.mark.parametrize("jitter", [0.0, 0.05, 0.2])
    def test_a_healthy_job_has_no_culprit(self, seed, instances, jitter):
        verdict = verdict_of(Made(instances, seed=seed, jitter=jitter))
        assert (verdict.culprit, verdict.link, verdict.input_bound) == (None, None, 0)
        assert verdict.outliers == []
        assert findings(verdict) == ["No instance, link or input holds the job up."]

    def test_shares_of_the_time_add_up_to_one(self):
        for shares in verdict_of(Made(3)).shares:
            assert sum(shares.values()) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("instances", SIZES)
def test_a_slow_link_is_named(seed, instances):
    verdict = verdict_of(Made(instances, slow_link=(instances - 1, 0), link_ms=30, seed=seed))
    assert (verdict.link.source, verdict.link.target) == (instances - 1, 0)
    assert verdict.culprit is None
    assert "mend or avoid the link" in verdict.changes[0].what


class TestALateInstanceBehindASlowLink:
    @pytest.mark.parametrize("instances", SIZES)
    def test_the_instance_is_named_with_its_link(self, seed, instances):
        """Its exchanges take longer, and so it arrives later at the next ones."""
        verdict = verdict_of(Made(instances, late_data_ms={1: 5}, seed=seed))
        assert (verdict.culprit.instance, verdict.culprit.cause) == (1, Cause.LINK)
        assert verdict.changes[0].what == "instance 1 is late: mend or avoid its link"


@pytest.mark.parametrize("held_up", [1, 10])
def test_a_link_that_delayed_few_exchanges_is_not_named(held_up):
    """Only some steps have a wait in the middle."""
    recordings = Made(2, slow_link=(1, 0), link_ms=30).recordings()
    events = recordings[0].events
    waits = np.flatnonzero(events["kind"] == EventKind.WAITS_FOR)
    few = replace(recordings[0], events=np.delete(events, waits[held_up:]))
    assert judge(put_together([few, recordings[1]])).link is None


@pytest.mark.parametrize("instances", [1, *SIZES])
def test_slow_input_of_all_instances_is_named(seed, instances):
    verdict = verdict_of(Made(instances, all_input_ms=20, seed=seed))
    assert verdict.input_bound == pytest.approx(20 / 32.2, abs=0.05)
    assert verdict.culprit is None
    assert verdict.changes[0].what.startswith("read data ahead")


def test_the_critical_path_follows_the_last_instance():
    verdict = verdict_of(Made(3, compute_ms={2: 20}))
    _, path = verdict.median_path
    assert [(each.instance, each.what) for each in path[:2]] == [
        (2, "compute"),
        (2, "exchange of all_reduce 'gradients'"),
    ]
    lasted = np.median(verdict.table.lasted_ns.max(axis=0)) / 1e9
    assert sum(each.lasted_s for each in path) == pytest.approx(lasted, rel=0.05)


def replica_spans(*rows):
    spans = np.zeros(len(rows), SPAN)
    for place, (begin, end, step, track) in enumerate(rows):
        spans[place] = (begin, end, step, 0, 0, track, 6, False)
    return spans


class TestOverlap:
    def test_overlap_with_any_of_the_others_counts_once(self):
        others = replica_spans((0, 10, 0, 1), (5, 20, 0, 1), (6, 7, 0, 1), (30, 40, 0, 1))
        assert inside_ns(replica_spans((8, 35, 0, 1)), others).sum() == 17
        assert inside_ns(replica_spans((20, 30, 0, 1), (50, 60, 0, 1)), others).sum() == 0
        assert inside_ns(replica_spans((0, 1, 0, 1), (6, 7, 0, 1)), others).sum() == 2

    def test_bubbles_are_the_idle_share_of_a_pipeline(self):
        spans = replica_spans((0, 10, 0, 1), (10, 20, 0, 2), (100, 120, 1, 1), (100, 120, 1, 2))
        assert bubbles_of(spans) == pytest.approx(1 - 60 / 80)

    def test_bubbles_of_several_pipelines_are_counted_separately(self):
        spans = replica_spans(*[(0, 10, 0, 1), (10, 20, 0, 2)] * 2)
        spans["name"] = [0, 0, 1, 1]
        assert bubbles_of(spans) == pytest.approx(1 / 2)


def test_the_last_execution_of_a_repeated_step_is_reported():
    recordings = Made(2, steps=6).recordings()
    once = table_of(put_together(recordings))
    for each in recordings:
        begins = each.events["kind"] == EventKind.STEP_BEGINS
        each.events["value"][begins & (each.events["value"] == 5)] = 4
    twice = table_of(put_together(recordings))
    assert twice.steps.tolist() == list(range(5))
    assert twice.end_ns[:, -1].tolist() == once.end_ns[:, -1].tolist()


class Page(HTMLParser):
    """The content of a page: open tags, all tags, links, text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.links, self.texts = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("href", "src")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture(scope="module")
def job():
    return put_together(Made(4, compute_ms={2: 14}, delays_ms={(1, 30): 400}).recordings())


class TestThePage:
    def test_the_page_needs_no_scripts_and_no_network(self, job):
        page = Page(report_page(job, judge(job)))
        assert page.open == []
        assert page.links == []
        assert "script" not in page.tags
        assert page.tags.count("svg") == 4 + 4, "a bar for each instance, two paths, and curves"
        assert "prefers-color-scheme:dark" in "".join(page.texts)

    def test_the_page_has_the_findings_of_the_text(self, job):
        verdict = judge(job)
        page = " ".join("".join(Page(report_page(job, verdict)).texts).split())
        text = " ".join(report_text(job, verdict).split())
        for sentence in findings(verdict):
            assert sentence in page
            assert sentence in text
        assert len(findings(verdict)) == 2

    def test_the_report_begins_with_the_program_its_size_and_the_date(self):
        job = put_together([replace(each, began_at_s=1.8e9) for each in Made(4).recordings()])
        said = "train.py, R = 8 replicas on n = 4 instances, begun 2027-01-15 08:00:00 UTC."
        assert said in report_text(job, judge(job)).splitlines()
        assert f"<p>{said}</p>" in report_page(job, judge(job))

    def test_pictures_stretch_and_cells_of_tables_have_their_headings_on_a_phone(self, job):
        page = report_page(job, judge(job))
        assert '<meta name="viewport" content="width=device-width,initial-scale=1">' in page
        assert page.count(' preserveAspectRatio="none"') == page.count("<svg") == 8
        assert page.count('<div class="wide"><table') == page.count("<table") == 2
        assert page.count("<td data-of=") == page.count("<td")
        assert '<td data-of="compute">' in page

    def test_the_height_of_the_chart_ignores_steps_that_compile(self):
        made = Made(2, delays_ms={(0, 0): 8000, (1, 1): 300})
        job = put_together(made.recordings())
        page = report_page(job, judge(job))
        assert "Step 0, which took 8.01 s, and 1 other are higher than the picture" in page
        tops = re.findall(r'<div class="scale"><span>([\d.]+) ms</span>', page)
        assert [11 < float(top) < 15 for top in tops] == [True]

    def test_host_names_are_escaped(self):
        recordings = [replace(each, host="<b>") for each in Made(2, compute_ms={1: 20}).recordings()]
        job = put_together(recordings)
        assert "<b>" not in report_page(job, judge(job))

    def test_an_empty_curve_is_not_drawn(self):
        assert draw_curves({"a": (np.zeros(0), np.zeros(0))}, "MB", "s") == ""

    def test_long_curves_keep_their_maxima(self):
        values = np.zeros(10_000)
        values[7003] = 5
        drawn = draw_curves({"a": (np.arange(10_000.0), values)}, "ms", "step")
        assert len(drawn) < 10_000
        assert "<span>5 ms</span><span>0</span>" in drawn

    def test_a_number_that_was_told_once_is_a_dot(self):
        drawn = draw_curves({"a": (np.array([3.0]), np.array([2.0]))}, "ms", "step")
        assert '<path class="line0 dot" d="M0.0 0.0h0"/>' in drawn

    @pytest.mark.parametrize(("across", "ends"), [("s", ["3 s", "157.2 s"]), ("step", ["step 3", "step 157.2"])])
    def test_the_ends_of_an_axis_have_its_unit_behind_or_its_name_before_them(self, across, ends):
        drawn = draw_curves({"a": (np.array([3.0, 157.2]), np.ones(2))}, "ms", across)
        assert re.findall(r"<span>([^<]*)</span>", drawn.partition('"range"')[2]) == ends


@pytest.mark.parametrize(
    ("seconds", "text"), [(1234.5, "1234 s"), (1.5, "1.5 s"), (0.0123, "12.3 ms"), (3e-5, "30 us")]
)
def test_times_have_a_suitable_unit(seconds, text):
    assert time_text(seconds) == text


def test_a_folder_without_training_is_refused(tmp_path):
    with pytest.raises(PopRunError, match="there are no recordings"):
        main(["report", str(tmp_path)])
    with pytest.raises(ValueError, match="no step was recorded"):
        judge(put_together(Made(2, steps=0).recordings()))
