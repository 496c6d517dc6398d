"""The loss, norms and learning rates in the report of a timeline."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from timeline_jobs import Made

from popdist.timeline.events import EventKind
from poprun.trace.merging import put_together
from poprun.trace.report.page import draw_curves, report_page
from poprun.trace.report.text import findings, report_text, training_rows
from poprun.trace.report.training import curves_of, layer_rows
from poprun.trace.report.verdict import judge

TOLD = {
    "loss": lambda step: 2 - step / 100,
    "gradient_norm": lambda step: 5.0 if step == 40 else 3.0,
    "gradient_norm/a": lambda step: 1.0,
    "gradient_norm/b": lambda step: 4.0 if step == 40 else 0.5,
    "weight_norm": lambda step: 10.0 + step,
    "weight_norm/a": lambda step: 7.0,
    "learning_rate": lambda step: 0.1 * 0.5**step,
}


def judged(recordings):
    return judge(put_together(recordings))


def test_the_training_stands_beside_the_time_of_its_steps():
    verdict = judged(Made(2, steps=28, pauses_ms={(1, 9): 400}, told=TOLD).recordings())
    title, *rows = training_rows(verdict)
    assert title == ["step", "after", "took", "loss", "gradient norm", "weight norm", "learning rate"]
    assert [row[0] for row in rows] == ["0", "3", "6", "9", "12", "15", "18", "21", "24", "27"]
    step, after, took, *numbers = rows[3]
    assert (step, numbers) == ("9", ["1.91", "3", "19", "0.0001953"])
    assert 0.4 < float(took.removesuffix(" s").removesuffix(" ms")) / (1000 if took.endswith(" ms") else 1) < 0.5
    assert float(after.removesuffix(" s").removesuffix(" ms")) > 0


def test_layers_with_the_largest_growth_over_their_median_come_first():
    verdict = judged(Made(2, told=TOLD).recordings())
    assert layer_rows(verdict.curves)[1:] == [
        ["b", "0.5", "0.5", "4", "40", "0.5", "-", "-"],
        ["a", "1", "1", "1", "0", "1", "7", "7"],
    ]


def test_a_step_whose_numbers_are_not_finite_is_found():
    told = {
        **TOLD,
        "loss": lambda step: float("nan") if step > 30 else 1.0,
        "gradient_norm/b": lambda s: np.inf ** (s == 30),
    }
    job = put_together(Made(2, told=told).recordings())
    verdict = judge(job)
    assert findings(verdict) == [
        "In step 30 gradient norm/b is not finite.",
        "No instance, link or input holds the job up.",
    ]
    assert layer_rows(verdict.curves)[1][:5] == ["b", "1", "1", "inf", "30"]
    assert "nan" not in "".join(re.findall(r'points="([^"]*)"', report_page(job, verdict)))


def test_a_job_that_has_told_a_loss_only_has_no_table_of_layers():
    job = put_together(Made(2).recordings())
    verdict = judge(job)
    assert training_rows(verdict)[0] == ["step", "after", "took", "loss"]
    assert layer_rows(verdict.curves) == []
    assert "Layers" not in report_text(job, verdict)


def test_a_job_that_has_told_nothing_has_no_training_in_its_report():
    def silent(recording):
        events = recording.events
        return replace(recording, events=events[events["kind"] != EventKind.MEASURED])

    job = put_together([silent(each) for each in Made(2).recordings()])
    verdict = judge(job)
    assert training_rows(verdict) == []
    assert "Training" not in report_text(job, verdict)
    assert "Training" not in report_page(job, verdict)


@pytest.mark.parametrize("every", [1, 7])
def test_norms_that_are_told_in_some_steps_choose_the_rows(every):
    """A norm that is told in every seventh step is not shown beside steps without one."""
    verdict = judged(Made(2, told={"gradient_norm": lambda step: 1.0}).recordings())
    thinned = {name: curve for name, curve in verdict.curves.items() if name != "gradient_norm"}
    norm = verdict.curves["gradient_norm"]
    chosen = norm.steps % every == 0
    thinned["gradient_norm"] = replace(
        norm, steps=norm.steps[chosen], time_s=norm.time_s[chosen], values=norm.values[chosen]
    )
    rows = training_rows(replace(verdict, curves=thinned))[1:]
    assert all(int(row[0]) % every == 0 for row in rows)
    assert all("-" not in row for row in rows)


def test_a_repeated_step_shows_its_last_numbers():
    recordings = Made(1, steps=10, told=TOLD).recordings()
    events = recordings[0].events
    begins = np.flatnonzero(events["kind"] == EventKind.STEP_BEGINS)
    again = events[begins[4] : begins[5]].copy()
    losses = [number for number, said in recordings[0].names.items() if said["name"] == "loss"]
    again["value"][(again["kind"] == EventKind.MEASURED) & (again["name"] == losses[0])] = np.float64(9.0).view(
        np.int64
    )
    again["when_ns"] += events["when_ns"][begins[5] - 1] - again["when_ns"][0]
    repeated = np.concatenate([events[: begins[5]], again, events[begins[5] :]])
    repeated["when_ns"] = np.maximum.accumulate(repeated["when_ns"])
    job = put_together([replace(recordings[0], events=repeated)])
    assert curves_of(job, judge(job).table)["loss"].at(4) == 9.0


def test_curves_below_zero_are_drawn_from_their_least_value():
    drawn = draw_curves({"a": (np.array([0.0, 1.0]), np.array([-4.0, -2.0]))}, "", "s")
    assert '<div class="scale"><span>0</span><span>-4</span></div>' in drawn
    heights = [float(point.split(",")[1]) for point in re.search(r'points="([^"]*)"', drawn)[1].split()]
    assert heights == [140.0, 70.0]


def test_the_names_of_many_layers_stand_in_a_legend_that_breaks_into_lines():
    curve = np.array([0.0, 1.0]), np.array([1.0, 2.0])
    names = [f"model.layers.{number}.attention.weight" for number in range(6)]
    drawn = draw_curves(dict.fromkeys(names, curve), "", "step")
    legend = drawn.partition('<div class="keys">')[2].partition("</div>")[0]
    assert re.findall(r'<i class="key(\d)"></i>([^<]*)<', legend) == [(str(n), name) for n, name in enumerate(names)]


def test_a_number_that_was_told_once_is_a_dot():
    drawn = draw_curves({"a": (np.array([3.0]), np.array([2.0]))}, "", "step")
    assert '<path class="line0 dot" d="M0.0 0.0h0"/>' in drawn
