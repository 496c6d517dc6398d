"""Truncated, damaged and forged recordings: each gives one line of error, and none fills the memory."""

from __future__ import annotations

import gzip
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from damage import damaged, file_of, forged
from timeline_jobs import Made

from popdist.timeline import events as blocks
from popdist.timeline.events import EVENT
from poprun.errors import PopRunError
from poprun.trace.command import main
from poprun.trace.merging import merge, put_together, to_be_judged
from poprun.trace.profiles import Profile, read_profile
from poprun.trace.recordings import parse_recording, read_recordings
from poprun.trace.report.page import report_page
from poprun.trace.report.step_table import table_of
from poprun.trace.report.text import report_text
from poprun.trace.report.verdict import judge

RECORDED = Made(2, steps=6).recordings()
FILES = [file_of(each) for each in RECORDED]


def write(folder: Path, *files: bytes) -> None:
    for number, data in enumerate(files):
        (folder / f"instance-{number}.timeline").write_bytes(data)


def show_all(folder: Path) -> bool:
    """Return whether the folder gives a trace and a report; unexpected exceptions pass through."""
    said = ""
    try:
        job = to_be_judged(read_recordings(folder))
        merge(folder, folder / "trace.json")
        if not (job.spans and len(table_of(job).steps)):
            return False
    except PopRunError as error:
        said = str(error)
    if said:
        assert "\n" not in said
        return False
    verdict = judge(job)
    assert report_text(job, verdict, 80)
    assert report_page(job, verdict).endswith("</html>\n")
    return True


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.complete)])
def test_a_damaged_file_gives_one_line_or_a_partial_report(tmp_path: Path, seed: int) -> None:
    write(tmp_path, *FILES)
    shown = 0
    for data in damaged(FILES[1], 60, seed):
        (tmp_path / "instance-1.timeline").write_bytes(data)
        shown += show_all(tmp_path)
    assert shown < 12, "only what looks as if it was cut at its end is shown"


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.complete)])
def test_a_forged_file_gives_one_line_or_no_harm(tmp_path: Path, seed: int) -> None:
    write(tmp_path, *FILES)
    for data in forged(RECORDED[1], 60, seed):
        (tmp_path / "instance-1.timeline").write_bytes(data)
        show_all(tmp_path)


def test_an_instance_killed_in_its_first_step_is_named(tmp_path: Path) -> None:
    write(tmp_path, FILES[0], file_of(replace(RECORDED[1], events=RECORDED[1].events[:5], is_complete=False)))
    with pytest.raises(PopRunError) as raised:
        main(["report", str(tmp_path)])
    assert str(raised.value) == (
        "there is nothing to report: no step was recorded by all instances: instance 1 (host0) completed none; "
        "remove its file to see the others"
    )
    assert raised.value.exit_status == 1


def test_instances_without_a_common_step_are_refused() -> None:
    later = RECORDED[1].events.copy()
    later["value"][later["kind"] == 1] += 100
    with pytest.raises(ValueError, match="instances have recorded no step in common"):
        judge(put_together([RECORDED[0], replace(RECORDED[1], events=later)]))


def test_a_truncated_file_still_gives_a_trace(tmp_path: Path) -> None:
    write(tmp_path, *FILES)
    for length in range(len(blocks.MAGIC), len(FILES[1]), 97):
        (tmp_path / "instance-1.timeline").write_bytes(FILES[1][:length])
        merge(tmp_path, tmp_path / "trace.json")
        show_all(tmp_path)


@pytest.mark.parametrize(("said", "words"), [(1, "does not have the 1 events that it announces"), (24 << 20, "has")])
def test_events_that_unpack_to_far_more_than_their_file_are_refused(tmp_path: Path, said: int, words: str) -> None:
    bomb = zlib.compress(bytes(24 << 20))
    head = FILES[1][: FILES[1].index(blocks.EVENTS)]
    count = (said // EVENT.itemsize or 1).to_bytes(4, "little")
    write(tmp_path, head + blocks.block(blocks.EVENTS, count + bomb) + blocks.block(blocks.END, b""))
    with pytest.raises(PopRunError, match=f"no recording that can be read: it {words}"):
        main(["report", str(tmp_path)])


def test_many_small_blocks_of_events_share_the_limit(tmp_path: Path) -> None:
    zeros = np.zeros(20_000, EVENT)
    zeros["kind"] = 8
    head = FILES[1][: FILES[1].index(blocks.EVENTS)]
    bomb = head + 10 * blocks.block(blocks.EVENTS, blocks.pack_events(zeros))
    with pytest.raises(ValueError, match="more than 64 for each byte of the file"):
        parse_recording(bomb)


def test_a_profile_that_unpacks_to_far_more_than_its_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bomb.json.gz").write_bytes(gzip.compress(b"[" + bytes(8 << 20), 9))
    with pytest.raises(ValueError, match="more than 200 bytes for each byte"):
        read_profile(tmp_path, Profile("jax", "bomb.json.gz", []))
    (tmp_path / "deep.json.gz").write_bytes(gzip.compress(b"[" * 100_000))
    with pytest.raises(ValueError, match="cut off or damaged"):
        read_profile(tmp_path, Profile("jax", "deep.json.gz", []))
