"""The plan of a pipeline, made without running anything: its timetable in pictures and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from popdist.switches import require_switches
from strategies.argument_checks import positive
from strategies.pipelines.mapping import (
    DeviceMapping,
    Stage,
    num_devices,
    places_of,
    schedule_for,
    stages_like,
    timetable_for,
)
from strategies.pipelines.pictures import COLUMNS, Panel, draw_text, unit_of
from strategies.pipelines.schedules import PipelineSchedule
from strategies.pipelines.times import StageTimes, equal_times
from strategies.pipelines.timetable import Timed, Timetable, bubble_share


@dataclass(frozen=True)
class Plan:
    """The planned actions of a replica's devices for one update; `str` of a plan is a table.

    Attributes:
        schedule: The name of the schedule.
        timetable: The actions of each device, in their order.
        times: The times of the stages.
        recompute: Whether backward passes recompute forward passes.
        in_seconds: Whether times are seconds. If not, 1 is the time of a forward pass.
    """

    schedule: str
    timetable: Timetable
    times: StageTimes
    recompute: bool = False
    in_seconds: bool = False

    @cached_property
    def spans(self) -> tuple[Timed, ...]:
        """The device, begin and end of each action, if each begins as soon as it can."""
        return self.timetable.timed(self.times.durations(self.recompute))

    @property
    def length(self) -> float:
        """The length of an update."""
        return max(span.end_s for span in self.spans)

    @property
    def bubble_share(self) -> float:
        """The idle share of the devices' time, 0 to 1."""
        return bubble_share(self.spans, len({span.device for span in self.spans}))

    @property
    def stash(self) -> tuple[int, ...]:
        """The largest number of micro-batches for which each stage keeps values at once.

        With recomputation the values are the stage's inputs, otherwise all that the backward pass needs.
        """
        return tuple(self.timetable.stash(stage) for stage in range(self.timetable.num_stages))

    @cached_property
    def panel(self) -> Panel:
        """The panel for pictures."""
        return Panel(self._title, self.spans, self.in_seconds)

    def text(self, columns: int = COLUMNS) -> str:
        """Draw the timetable as lines of at most `columns` columns; see `draw_text`."""
        return draw_text(self.panel, columns)

    def __str__(self) -> str:
        unit = unit_of(max([*self.times.whole, *self.times.update]), self.in_seconds)
        behind = f" ({unit.name})" if self.in_seconds else ""
        rows = [["stage", "devices", f"forward{behind}", f"backward{behind}", "kept micro-batches"]]
        for stage, devices in enumerate(self.timetable.mapping):
            times = [f"{of[stage] / unit.size:.3g}" for of in (self.times.forward, self.times.backward)]
            rows.append([str(stage), ", ".join(map(str, devices)), *times, str(self.stash[stage])])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(line.rstrip() for line in [self._title, *lines])

    @property
    def _title(self) -> str:
        devices = len({span.device for span in self.spans})
        what = " with recomputation" if self.recompute else "" if self.timetable.training else ", inference"
        long = unit_of(self.length, self.in_seconds).said(self.length)
        return (
            f"{self.schedule}{what}: {_counted(self.timetable.num_stages, 'stage')} on {_counted(devices, 'device')}, "
            f"{_counted(self.timetable.num_micro_batches, 'micro-batch')}, {long} long, {self.bubble_share:.1%} bubbles"
        )


def plan(
    computational_stages: int | Sequence[Stage],
    gradient_accumulation_count: int,
    pipeline_schedule: PipelineSchedule | str | None = None,
    device_mapping: DeviceMapping | None = None,
    *,
    training: bool = True,
    recompute: bool = False,
    times: StageTimes | None = None,
    batch_serialization_iterations: int = 1,
    ipus_per_replica: int | None = None,
) -> Plan:
    """Plan a pipeline with these arguments, without running or compiling anything.

        print(pipelining_ops.plan(4, 8, "one_forward_one_backward").text())

    Args:
        computational_stages: The stages, or their number.
        gradient_accumulation_count: Number of micro-batches of an update.
        pipeline_schedule: A member of the enum, or its name; Grouped by default.
        device_mapping: The device of each stage, or a list of devices for a stage that is a list of functions. By
            default each stage has its own device.
        training: Whether there are backward passes and updates.
        recompute: Whether backward passes begin with the forward pass of their stage.
        times: The times of the stages, in seconds, such as those of a `Trace`. By default all stages are alike: a
            backward pass takes as long as two forward passes, an update as long as one.
        batch_serialization_iterations: Number of micro-batches that a stage takes one after another.
        ipus_per_replica: Number of devices; by default as many as the mapping needs.

    Raises:
        TypeError, NotImplementedError, FailedPreconditionError: As `pipeline` does.
        ValueError: As `pipeline` does; or if there are not times of all stages.
    """
    require_switches(training=training, recompute=recompute)
    stages = computational_stages
    if not isinstance(stages, Sequence):
        stages = stages_like(device_mapping, positive("computational_stages", stages))
    if ipus_per_replica is None:
        ipus_per_replica = num_devices(device_mapping, len(stages))
    devices = positive("ipus_per_replica", ipus_per_replica)
    places = places_of(stages, device_mapping, devices, batch_serialization_iterations)
    schedule = schedule_for(pipeline_schedule, batch_serialization_iterations)
    count = gradient_accumulation_count
    timetable = timetable_for(schedule, places, count, training, batch_serialization_iterations)
    if times is not None and times.num_stages != len(stages):
        raise ValueError(f"there are {len(stages)} stages, but times of {times.num_stages}; give those of each stage")
    return Plan(schedule.name, timetable, times or equal_times(len(stages)), recompute, times is not None)


def _counted(number: int, what: str) -> str:
    plural = f"{what}es" if what.endswith("ch") else f"{what}s"
    return f"{number} {what if number == 1 else plural}"
