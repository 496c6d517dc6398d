"""Pipelines as SVG: what is in the file; how it looks is for eyes."""

import re
from xml.etree import ElementTree

import pytest

from strategies.pipelines.pictures.panel import Panel
from strategies.pipelines.pictures.svg import CLASSES, HATCHES, draw_svg
from strategies.pipelines.schedules.registry import schedule_named, schedules_by_name
from strategies.pipelines.timetable import Action, Kind, Timed, placed

SVG = "{http://www.w3.org/2000/svg}"


def panel(name, mapping, micro_batches):
    timetable = schedule_named(name).timetable(placed(mapping), micro_batches, True)
    return Panel(f"{name} <&>", timetable.timed(), False)


def boxes(root):
    """The boxes of actions, with what shows when the mouse is on them: (left, top, width, height, words)."""
    return [
        (*(float(box.get(name)) for name in ("x", "y", "width", "height")), box.findtext(f"{SVG}title"))
        for box in root.iter(f"{SVG}rect")
        if box.find(f"{SVG}title") is not None
    ]


@pytest.mark.parametrize("name", sorted(schedules_by_name()))
def test_every_action_is_a_box_inside_of_the_picture(name):
    drawn = panel(name, [0, 1, 2], 6)
    root = ElementTree.fromstring(draw_svg([drawn]))
    width, height = float(root.get("width")), float(root.get("height"))
    found = boxes(root)
    assert sorted(words.partition(":")[0] for *_, words in found) == sorted(str(span.action) for span in drawn.spans)
    assert all(x >= 0 and x + wide <= width and y >= 0 and y + high <= height for x, y, wide, high, _ in found)


@pytest.mark.parametrize("mapping", [[0, 1, 2], [0, 1, 0], [0, [0, 1], 1]], ids=str)
def test_boxes_do_not_lie_over_each_other(mapping):
    found = boxes(ElementTree.fromstring(draw_svg([panel("grouped", mapping, 6)])))
    for number, (x, y, width, height, _) in enumerate(found):
        for left, top, wide, high, _ in found[:number]:
            apart = (x + width, left + wide, y + height, top + high)
            assert apart[0] <= left + 0.1 or apart[1] <= x + 0.1 or apart[2] <= top or apart[3] <= y


def test_panels_have_one_scale():
    short, long = panel("zero_bubble", [0, 1, 2], 8), panel("sequential", [0, 1, 2], 8)
    found = boxes(ElementTree.fromstring(draw_svg([short, long])))
    widths = {round(width, 1) for _, _, width, _, words in found if words.startswith("forward")}
    assert len(widths) == 1
    assert max(x + width for x, _, width, *_ in found) == pytest.approx(1000 - 12, abs=0.1)


def test_it_says_how_long_an_action_takes_and_when_it_begins():
    spans = (Timed(0, Action(Kind.FORWARD, 0, 0), 1.0, 1.002), Timed(0, Action(Kind.UPDATE, 0, None), 1.05, 1.0875))
    found = boxes(ElementTree.fromstring(draw_svg([Panel("", spans, True)])))
    assert found[0][-1] == "forward of stage 0 for micro-batch 0: 2 ms from 0 ms"
    assert found[1][-1] == "update of stage 0: 37.5 ms from 50 ms"


def test_kinds_are_told_apart_without_colours():
    assert len(set(HATCHES.values())) == len(HATCHES) == len(Kind) - 1
    text = draw_svg([panel("grouped", [0, 1], 4), panel("zero_bubble", [0, 1], 4)])
    assert [text.count(f'id="pipeline-{CLASSES[kind]}"') for kind in HATCHES] == [1] * len(HATCHES)
    for words in ("F forward", "B backward", "I backward of inputs", "W backward of weights", "U update", "nothing to"):
        assert f">{words}" in text


def test_numbers_are_in_boxes_that_have_room():
    def labels(width):
        return re.findall(r'text-anchor|<text x="[\d.]+" y="[\d.]+">([FB]?\d+)</text>', draw_svg([drawn], width))

    drawn = panel("grouped", [0, 1], 4)
    assert {"F0", "F3", "B0", "B3"} <= set(labels(1000))
    assert "F0" not in labels(300)


def test_it_is_one_file_without_scripts_that_follows_the_readers_mode():
    text = draw_svg([panel("grouped", [0, 1], 4)])
    assert "prefers-color-scheme:dark" in text
    assert "<script" not in text
    assert re.findall(r"(?:href|src)=|url\((?!#)", text) == []
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_pictures_of_nothing_and_narrow_ones_are_refused():
    with pytest.raises(ValueError, match="0 panels, 1000 pixels wide"):
        draw_svg([])
    with pytest.raises(ValueError, match="1 panels, 299 pixels wide, are asked for; it takes 1 or more, and 300"):
        draw_svg([panel("grouped", [0, 1], 4)], 299)
