"""The report as text."""

from __future__ import annotations

from poprun.cli.pages import USUAL_COLUMNS, draw_rows, wrap
from poprun.trace.merging import Job
from poprun.trace.report.sentences import changes, findings, headline, instance_rows, origin, paths, share_rows
from poprun.trace.report.verdict import Verdict


def report_text(job: Job, verdict: Verdict, columns: int | None = None) -> str:
    """All of it.

    Args:
        job: what was recorded.
        verdict: about it.
        columns: of the page; None: as many as tables take.
    """
    width = columns or USUAL_COLUMNS
    blocks = [
        wrap(f"{headline(verdict)}.", width) + "\n" + wrap(f"{origin(job)}.", width),
        "\n".join(wrap(each, width) for each in findings(verdict)),
        "Where the time went\n" + draw_rows(share_rows(verdict), columns),
        "Instances\n" + draw_rows(instance_rows(job, verdict), columns),
        "Critical paths\n" + "\n".join(wrap(f"{title}: {path}", width, 2) for title, path in paths(verdict)),
    ]
    if said := changes(verdict):
        blocks.append("What would gain most\n" + "\n".join(wrap(each, width, 2) for each in said))
    blocks += [wrap(f"Warning: {each}", width) for each in verdict.warnings]
    return "\n\n".join(blocks)
