"""The picture of `poprun top`: a table of instances that fits the page."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from job_scripts import exited, killed

from popdist.records.progress import Made, ProgressRecord, State
from poprun.ipc.facts import Facts
from poprun.monitor.picture import AWAITED, HEADINGS, picture_of
from poprun.monitor.snapshot import (
    APART_S,
    ENDED,
    JOINING,
    LEAVING,
    LOST,
    RUNNING,
    SPARE,
    STARTING,
    STOPPED,
    WAITING,
    Recent,
    Seen,
    Snapshot,
    look_at,
)

MIB = 2**20
SEEN = Seen(0, "node0", 77, RUNNING, "exchange", 0.2, 12, 10.0, 640.0, 0.25, (), 0.125, 50 * MIB, 60 * MIB)


def snapshot(*instances: Seen, **more) -> Snapshot:
    return Snapshot(4711, "node0", ("python", "train.py"), 65.0, instances=instances, **more)


def many(count: int) -> list[Seen]:
    return [replace(SEEN, instance=index, host=f"node{index // 8}") for index in range(count)]


def fast(steps: int, to_s: float) -> Made:
    return Made(steps, 32 * steps, steps - 1, 32 * (steps - 1), 1.0, to_s)


class TestRates:
    def test_rates_cover_the_last_seconds(self):
        recent = Recent()
        for second in range(100):  # first ten steps a second, then one
            recent.note(0, fast(1 + 10 * min(second, 50) + max(second - 50, 0), float(second)))
            recent.note(0, fast(1 + 10 * min(second, 50) + max(second - 50, 0), second + APART_S / 2))
        assert recent.rates(0, fast(550, 99.0), 99.1) == (1.0, 32.0)

    def test_rates_fall_when_steps_stop(self):
        recent = Recent()
        recent.note(0, fast(1, 1.0))
        recent.note(0, fast(11, 2.0))
        assert recent.rates(0, fast(11, 2.0), 2.05) == (10.0, 320.0)
        assert recent.rates(0, fast(11, 2.0), 11.1)[0] == pytest.approx(1.0)

    def test_rates_are_unknown_before_two_steps(self):
        recent = Recent()
        assert recent.rates(0, Made(), 1.0) is None
        recent.note(0, Made())
        recent.note(0, fast(1, 1.0))
        assert recent.rates(0, fast(1, 1.0), 5.0) is None
        assert recent.rates(1, fast(7, 1.0), 5.0) is None


class TestAnInstance:
    @pytest.mark.parametrize(
        ("facts", "condition", "doing"),
        [
            (Facts(0), STARTING, "not there yet"),
            (Facts(0, "a", 7), RUNNING, ""),
            (Facts(0, "a", 7, stopped_since_s=1.0), STOPPED, "stopped by a signal"),
            (Facts(0, "a", 7, exited()), ENDED, "ended with exit status 0"),
            (Facts(0, "a", 7, killed()), LOST, "was killed by SIGKILL"),
            (Facts(0, "a", 7, is_given_up=True), LOST, "the others go on without it"),
            (Facts(0, "a", 7, record=ProgressRecord(state=State.JOINING)), JOINING, "popdist.init"),
            (Facts(0, "a", 7, record=ProgressRecord(state=State.LEAVING)), LEAVING, "at its end"),
            (Facts(0, "a", 7, record=ProgressRecord(state=State.RUNNING)), RUNNING, "before its first step"),
            (Facts(0, "a", 7, record=ProgressRecord(state=State.RUNNING, made=Made(1))), RUNNING, "between steps"),
            (Facts(0, "a", 7, record=ProgressRecord(state=State.RUNNING, phase="update")), RUNNING, "update"),
            (
                Facts(0, "a", 7, record=ProgressRecord(label="barrier", state=State.IN_COLLECTIVE, phase="exchange")),
                RUNNING,
                "exchange",
            ),
            (
                Facts(0, "a", 7, record=ProgressRecord(label="barrier", state=State.IN_COLLECTIVE, waiting_for=(1,))),
                WAITING,
                "barrier",
            ),
        ],
    )
    def test_the_state_of_an_instance_is_described(self, facts, condition, doing):
        seen = look_at(facts, Recent(), 10.0)
        assert (seen.condition, seen.doing) == (condition, doing)

    def test_known_numbers_are_shown(self):
        record = ProgressRecord(5, 7, "barrier", State.RUNNING, 9.0, made=replace(fast(6, 9.0), waited_s=2.0, loss=0.5))
        recent = Recent()
        recent.note(0, fast(2, 5.0))
        seen = look_at(Facts(0, "a", 7, record=record, memory_bytes=5, peak_memory_bytes=6), recent, 10.0)
        assert (seen.step, seen.for_s, seen.loss, seen.memory_bytes) == (5, 1.0, 0.5, 5)
        assert (seen.steps_per_s, seen.samples_per_s, seen.waiting_share) == (1.0, 32.0, 0.25)

    @pytest.mark.parametrize("loss", [float("nan"), float("inf")])
    def test_a_loss_that_is_nan_or_infinite_becomes_null(self, loss):
        record = ProgressRecord(made=replace(fast(6, 9.0), loss=loss))
        assert look_at(Facts(0, "a", 7, record=record), Recent(), 10.0).loss is None


class TestSnapshots:
    def test_a_snapshot_survives_its_message(self):
        sent = snapshot(SEEN, Seen(1, waiting_for=(0, 2)), attempt=2, losses=1)
        assert Snapshot.unpack(sent.pack()) == sent

    @pytest.mark.parametrize("data", [b"", b"\xff", b"[]", b"{}", b'{"version": 2}', b'{"version": 1, "instances": 3}'])
    def test_an_invalid_snapshot_is_refused(self, data):
        with pytest.raises(ValueError, match=r"."):
            Snapshot.unpack(data)


USUAL = tuple(each for each in HEADINGS if each != "replicas")


class TestThePage:
    def test_all_known_facts_are_shown(self):
        waits = replace(SEEN, instance=0, condition=WAITING, doing="all_reduce 'gradients'", waiting_for=(1, 2))
        picture = picture_of(snapshot(waits, replace(SEEN, instance=1), Seen(2), attempt=1, losses=2))
        assert picture.head == (
            "poprun 4711 on node0: python train.py",
            "3 instances, runs for 1 min 5 s, 10.0 steps/s, 1280 samples/s, restart 1, 2 instances lost",
            "instance 0 waits for instances 1-2",
        )
        assert picture.headings == USUAL
        assert picture.rows[0].cells == (
            *("0", "node0", "12", "10.0", "640", "all_reduce 'gradients'", "0.2 s", "25 %", "1-2", "50 MiB", "0.125"),
        )
        assert picture.rows[2].cells == ("2", "-", "-", "-", "-", "starting", "-", "-", "-", "-", "-")
        assert [row.mark for row in picture.rows] == [WAITING, AWAITED, AWAITED]
        assert picture.foot == ()

    def test_spares_and_their_use_are_shown(self):
        instances = [
            replace(SEEN, instance=0, condition=LOST),
            replace(SEEN, instance=1, replicas=(0, 3)),
            replace(SEEN, instance=2, replicas=(4, 4)),
            Seen(3, condition=SPARE, doing="ready to take over"),
        ]
        picture = picture_of(snapshot(*instances, losses=1, replaced=1))
        assert picture.head[1].startswith("2 instances, 1 spare, runs for")
        assert picture.head[1].endswith(", 1 instance lost, 1 replaced")
        assert [row.cells[HEADINGS.index("replicas")] for row in picture.rows] == ["-", "0-3", "4", "-"]
        assert "replicas" not in picture_of(snapshot(*instances), 60).headings

    @pytest.mark.parametrize("columns", [20, 30, 40, 60, 80, 100, 120, 200])
    def test_the_picture_fits_the_width_of_the_window(self, columns):
        long = replace(SEEN, instance=3, doing="ordered_all_reduce 'gradients/float32'", condition=WAITING)
        picture = picture_of(snapshot(*many(12), long), columns)
        assert max(map(len, picture.text().splitlines())) <= max(columns, 32)
        assert {"instance", "step", "does"} <= set(picture.headings)

    def test_all_columns_are_kept_if_they_fit(self):
        assert picture_of(snapshot(*many(2)), 120).headings == USUAL
        assert picture_of(snapshot(*(replace(each, replicas=(0, 3)) for each in many(2))), 120).headings == HEADINGS

    @pytest.mark.parametrize("waits", ["0", "0-14,16"])
    def test_80_columns_show_activity_waits_and_waiting_share(self, waits):
        """The line above the table shows rates, too."""
        those = (0,) if waits == "0" else (*range(15), 16)
        long = replace(SEEN, instance=17, step=123_456, samples_per_s=123_456.0, waiting_for=those, condition=WAITING)
        picture = picture_of(snapshot(*many(12), replace(long, doing="all_reduce 'gradients'")), 80)
        assert {"instance", "step", "does", "waited", "waits for"} <= set(picture.headings)
        assert "samples/s" in picture.head[1]
        cells = dict(zip(picture.headings, picture.rows[-1].cells, strict=True))
        assert (cells["waits for"], cells["does"][:17]) == (waits, "all_reduce 'gradi")

    def test_the_name_of_a_single_host_is_dropped_first(self):
        same = [replace(each, host="a-host-of-a-long-name") for each in many(4)]
        headings = picture_of(snapshot(*same), 90).headings
        assert "host" not in headings
        assert "steps/s" in headings

    @pytest.mark.parametrize("lines", [3, 9, 24, 50])
    def test_the_picture_fits_the_height_of_the_window_with_trouble_first(self, lines):
        instances = many(64)
        instances[40] = replace(instances[40], waiting_for=(50,), condition=WAITING)
        instances[60] = replace(instances[60], condition=LOST)
        picture = picture_of(snapshot(*instances), 100, lines)
        shown = [int(row.cells[0]) for row in picture.rows]
        assert len(picture.text().splitlines()) <= max(lines, 8)
        assert {50, 60} <= set(shown)
        assert shown == sorted(shown)
        assert picture.foot[0].startswith(f"{64 - len(shown)} more instances, none in trouble")

    def test_tells_whether_trouble_is_left_out(self):
        lost = [replace(each, condition=LOST) for each in many(5)]
        assert picture_of(snapshot(*lost), 100, 1).foot[0].startswith("2 more instances, some in trouble; ")

    def test_all_64_instances_are_shown_if_they_fit(self):
        picture = picture_of(snapshot(*many(64)), 100, 80)
        assert (len(picture.rows), picture.foot) == (64, ())

    def test_a_silent_poprun_and_a_pause_between_attempts_are_shown(self):
        assert picture_of(snapshot(SEEN), silent_s=2.0).head[-1].startswith("1 instance, runs")
        assert picture_of(snapshot(SEEN), silent_s=7.0).head[-1] == "poprun has said nothing for 7.0 s"
        assert picture_of(snapshot(attempt=1)).head[-1] == "no instance runs: the job is about to be started again"

    def test_terminal_controls_are_removed(self):
        evil = replace(SEEN, host="\x1b[2J", doing="\x9b31m")
        text = picture_of(replace(snapshot(evil), program=("\x1b]0;x\x07",)), 200).text()
        assert text.replace("\n", "").isprintable()


class TestWithRich:
    @pytest.fixture
    def draw(self):
        console = pytest.importorskip("rich.console")
        rich_screen = pytest.importorskip("poprun.monitor.rich_screen")

        def draw(picture, **options) -> str:
            file = io.StringIO()
            options = {"width": 120, "force_terminal": True, "color_system": "truecolor"} | options
            console.Console(file=file, **options).print(rich_screen.drawn(picture))
            return file.getvalue()

        return draw

    def test_the_table_has_the_same_text_and_colours_for_trouble(self, draw):
        picture = picture_of(snapshot(SEEN, replace(SEEN, instance=1, condition=LOST, doing="[red]x[/red]")))
        drawn = draw(picture)
        assert "[red]x[/red]" in drawn
        assert "\x1b[1;31m" in drawn
        words = " ".join(draw(picture, color_system=None, force_terminal=False).split())
        assert " ".join(picture.rows[0].cells) in words

    def test_colours_can_be_disabled(self, draw):
        picture = picture_of(snapshot(replace(SEEN, condition=WAITING, waiting_for=(0,))))
        assert "\x1b[3" not in draw(picture, no_color=True)
