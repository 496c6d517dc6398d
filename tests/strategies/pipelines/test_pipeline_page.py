"""Plans on the page pipeline_schedules.md: timetables and the table are up to date."""

import draw_pipelines


def test_the_table_and_the_timetables_are_up_to_date():
    page = draw_pipelines.PAGE.read_text(encoding="utf-8")
    assert page == draw_pipelines.written(page), "run python docs/draw_pipelines.py"
