"""Plans on the page pipeline_schedules.md: timetables, table and log line are up to date."""

import draw_pipelines

from strategies.pipelines.advice import MIB, choose
from strategies.pipelines.times import StageTimes, StashBytes
from strategies.pipelines.timetable import placed


def test_the_table_and_the_timetables_are_up_to_date():
    page = draw_pipelines.PAGE.read_text(encoding="utf-8")
    assert page == draw_pipelines.written(page), "run python docs/draw_pipelines.py"


def test_the_sentence_on_auto_is_up_to_date():
    times = StageTimes((0.01,) * 4, (0.02,) * 4, update=(0.002,) * 4)
    stash = StashBytes((40 * MIB,) * 4, (2 * MIB,) * 4)
    page = " ".join(draw_pipelines.PAGE.read_text(encoding="utf-8").split())
    assert choose(times, stash, placed(range(4)), 24, 120 * MIB).reason in page
