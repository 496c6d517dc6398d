"""The measured actions of a pipeline's devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

from strategies.pipelines.advice import WORTH, Cut, better_cut, even_length, moves, slowest
from strategies.pipelines.pictures import COLUMNS, Panel, draw_text, perfetto, said_s, unit_of
from strategies.pipelines.times import StageTimes, measured_times
from strategies.pipelines.timetable import ActionKind, StageAction, Timed, Timetable


@dataclass(frozen=True)
class Trace:
    """The actions of one update, or one round of micro-batches, of a pipeline; `str` of a trace is a table.

    Attributes:
        replicas: For each watched replica, by its global index, the timed actions of its devices. Times are in seconds
            from a start that all replicas share.
        recompute: Whether backward passes recomputed forward passes.

    Raises:
        ValueError: If there is no replica, or a replica has no action.
    """

    replicas: Mapping[int, Sequence[Timed]]
    recompute: bool = False

    def __post_init__(self) -> None:
        if not self.replicas or not all(self.replicas.values()):
            raise ValueError("a trace needs actions; give the timed actions of the devices of at least one replica")
        object.__setattr__(self, "replicas", {number: tuple(self.replicas[number]) for number in sorted(self.replicas)})

    @cached_property
    def times(self) -> StageTimes:
        """The times of the stages without recomputation, medians over micro-batches and replicas."""
        return measured_times(self.replicas.values(), self.recompute)

    @cached_property
    def mean_times(self) -> StageTimes:
        """The times of the stages as means. Means above the medians show that actions were interrupted."""
        return measured_times(self.replicas.values(), self.recompute, fmean)

    @property
    def length_s(self) -> float:
        """The time from the first begin to the last end, of the replica that took the longest."""
        return max(panel.length for panel in self.panels)

    @property
    def bubble_share(self) -> float:
        """The idle share of the devices' time, 0 to 1, over all replicas."""
        return sum(panel.bubble_share for panel in self.panels) / len(self.panels)

    @cached_property
    def panels(self) -> list[Panel]:
        """The panels for pictures, one for each replica."""
        found = {replica: Panel("", tuple(spans), True) for replica, spans in self.replicas.items()}
        return [
            replace(
                panel,
                title=f"replica {replica}, measured: {said_s(panel.length)}, {panel.bubble_share:.1%} bubbles on "
                f"{len(panel.lanes)} devices",
            )
            for replica, panel in found.items()
        ]

    def text(self, columns: int = COLUMNS) -> str:
        """Draw the trace as lines of at most `columns` columns, one replica below another; see `draw_text`."""
        return "\n".join(draw_text(panel, columns) for panel in self.panels)

    def perfetto(self) -> str:
        """Return the trace for ui.perfetto.dev: JSON to write into a file; see `perfetto`."""
        return perfetto(self.replicas)

    def timetable(self) -> Timetable:
        """Return the order of the first replica's actions.

        Raises:
            ValueError: If the actions are not those of one whole update.
        """
        return observed(self.replicas[min(self.replicas)])

    def advice(self) -> str:
        """Return a sentence on the slowest stage, and on the moves of cuts that would give all devices equal work.

        Whether the model can be cut there is not known here; `better_cut` knows the parts.
        """
        stage, unit = slowest(self.times), unit_of(max(self.times.whole), True)
        mean = sum(self.times.whole) / self.times.num_stages
        return (
            f"stage {stage} is the slowest: {unit.said(self.times.whole[stage])} for a micro-batch; the mean is "
            f"{unit.said(mean)}. {self._gain()}"
        )

    def _gain(self) -> str:
        timetable = self.timetable()
        length = timetable.length(self.times.durations(self.recompute))
        even = even_length(timetable, self.times, self.recompute)
        gain = 1 - even / length if length else 0.0
        if gain < WORTH:
            return f"Other cuts would gain less than {WORTH:.0%}"
        before, after = said_s(length), said_s(even)
        how = ", ".join(map(str, moves(timetable, self.times)))
        return (
            f"With equal work on all devices an update would take {after} instead of {before} (both simulated): "
            f"move {how}"
        )

    def better_cut(self, parts: StageTimes, sizes: Sequence[int]) -> Cut:
        """Return a better cut, for parts of stages whose times are known; see `advice.better_cut`.

        Args:
            parts: The times of the parts of stages (layers, blocks), in their order, in seconds.
            sizes: The present number of parts of each stage.
        """
        return better_cut(self.timetable(), parts, sizes, self.recompute)

    def __str__(self) -> str:
        unit = unit_of(max(self.times.whole), True)
        lines = [panel.title for panel in self.panels]
        lines.append(f"times in {unit.name}, medians and (means)")
        lines.append(f"{'stage':5}  {'forward':>16}  {'backward':>16}  share of all")
        for stage in range(self.times.num_stages):
            medians, means = self.times, self.mean_times
            cells = [
                f"{of[stage] / unit.size:.3g} ({mean[stage] / unit.size:.3g})"
                for of, mean in ((medians.forward, means.forward), (medians.backward, means.backward))
            ]
            share = self.times.whole[stage] / sum(self.times.whole) if any(self.times.whole) else 0.0
            lines.append(f"{stage:<5}  {cells[0]:>16}  {cells[1]:>16}  {share:>12.1%}")
        return "\n".join([*lines, self.advice()])


def observed(spans: Sequence[Timed]) -> Timetable:
    """Return the timetable that one update followed.

    Raises:
        ValueError: If actions are missing, or belong to more than one update.
    """
    ordered = sorted(spans, key=lambda span: (span.begin_s, span.end_s))
    actions: list[list[StageAction]] = [[] for _ in range(1 + max(span.device for span in spans))]
    places: list[set[int]] = [set() for _ in range(1 + max(span.action.stage for span in spans))]
    for span in ordered:
        actions[span.device].append(span.action)
        places[span.action.stage].add(span.device)
    return Timetable(
        tuple(map(tuple, actions)),
        tuple(tuple(sorted(devices)) for devices in places),
        1 + max((span.action.micro_batch or 0 for span in spans), default=0),
        any(span.action.kind is not ActionKind.FORWARD for span in spans),
        _is_in_turn(spans),
    )


def _is_in_turn(spans: Sequence[Timed]) -> bool:
    """Return whether every micro-batch began after the end of the one before."""
    begins: dict[int, float] = {}
    ends: dict[int, float] = {}
    for _, action, begin, end in spans:
        if action.micro_batch is not None:
            begins[action.micro_batch] = min(begin, begins.get(action.micro_batch, begin))
            ends[action.micro_batch] = max(end, ends.get(action.micro_batch, end))
    return len(begins) > 1 and all(ends[number - 1] <= begins[number] for number in begins if number - 1 in ends)
