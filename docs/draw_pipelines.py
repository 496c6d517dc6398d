"""Writer of the table of schedules and the timetables in docs/how_to/train/pipeline_schedules.md.

    python docs/draw_pipelines.py     after a new schedule or a change of timetables

The generated parts of the page are between `<!-- name -->` and `<!-- end of name -->`.
"""

from __future__ import annotations

import re
from pathlib import Path

from strategies.pipelines.plan import Plan, plan
from strategies.pipelines.timetable import PipelineSchedule, placed, schedule_named

PAGE = Path(__file__).parent / "how_to" / "train" / "pipeline_schedules.md"
STAGES, MICRO_BATCHES, IN_COMPARISON, IN_TEXT = 4, 24, 8, 12
COMPARED = (PipelineSchedule.Grouped, PipelineSchedule.OneForwardOneBackward)
ON_TWO_DEVICES = [0, 1, 1, 0]
HEAD = (
    "| schedule | length | bubbles | the same on two devices | micro-batches kept by stages 0 to 3 "
    "| with recomputation | accumulation count |\n|---|---|---|---|---|---|---|"
)


def table() -> str:
    """Return the table, with a row for each schedule."""
    return "\n".join([HEAD, *map(_row, PipelineSchedule)])


def _row(schedule: PipelineSchedule) -> str:
    made = plan(STAGES, MICRO_BATCHES, schedule)
    overlap = schedule_named(schedule).overlap(placed(range(STAGES)), True)
    return (
        f"| {schedule.name} | {made.length:g} | {made.bubble_share:.1%} | {_on_two_devices(schedule)} "
        f"| {', '.join(map(str, made.stash))} | {plan(STAGES, MICRO_BATCHES, schedule, recompute=True).length:g} "
        f"| {'any' if overlap == 1 else f'multiples of {overlap}'} |"
    )


def _on_two_devices(schedule: PipelineSchedule) -> str:
    try:
        made: Plan = plan(STAGES, MICRO_BATCHES, schedule, ON_TWO_DEVICES)
    except NotImplementedError:
        return "refused"
    return f"{made.length:g}, {made.bubble_share:.1%}"


def written(page: str) -> str:
    """Return the page with its generated parts replaced."""
    compared = "\n".join(plan(STAGES, IN_COMPARISON, one).text(columns=120) for one in COMPARED)
    parts = {
        "table of schedules": table(),
        "a timetable": f"```text\n{plan(STAGES, IN_TEXT, 'zero_bubble').text()}```",
        "timetables of two schedules": f"```text\n{compared}```",
    }
    for name, text in parts.items():
        page, number = re.subn(
            rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)",
            lambda found, text=text: f"{found[1]}{text}\n{found[2]}",
            page,
            flags=re.DOTALL,
        )
        assert number == 1, f"docs/how_to/train/pipeline_schedules.md lacks the marks of {name}"
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
