"""What docs/pipelines.md shows of plans is what they say."""

import draw_pipelines


def test_the_picture_of_schedules_is_up_to_date():
    assert draw_pipelines.PICTURE.read_text(encoding="utf-8") == draw_pipelines.draw(), "run docs/draw_pipelines.py"


def test_the_table_and_the_timetable_are_up_to_date():
    page = draw_pipelines.PAGE.read_text(encoding="utf-8")
    assert page == draw_pipelines.written(page), "run python docs/draw_pipelines.py"


def test_the_sentence_on_auto_is_what_it_says():
    """For the numbers of `test_pipeline_choice.py`."""
    page = " ".join(draw_pipelines.PAGE.read_text(encoding="utf-8").split())
    assert (
        "interleaved with recomputation was chosen: 1.08 s for an update is the shortest of 6 of 10 ways to run it "
        "that keep at most 120 MiB on a device, and it keeps 48 MiB; zero_bubble would take 752 ms, but keep 160 MiB"
    ) in page
