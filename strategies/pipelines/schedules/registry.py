"""The schedules by their names."""

from __future__ import annotations

import pkgutil
import re
from enum import Enum
from functools import cache
from importlib import import_module

from strategies.pipelines import schedules
from strategies.pipelines.schedules.schedule import Schedule


class PipelineSchedule(Enum):
    """In which order the stages of a pipeline run.

    Semantics: the original's `PipelineSchedule`; it has the first three.
    """

    Grouped = 0
    Interleaved = 1
    Sequential = 2
    OneForwardOneBackward = 3
    ZeroBubble = 4


@cache
def schedules_by_name() -> dict[str, Schedule]:
    """The schedule of each file of this folder that has one."""
    modules = [import_module(f"{schedules.__name__}.{one.name}") for one in pkgutil.iter_modules(schedules.__path__)]
    found = [module.SCHEDULE for module in modules if hasattr(module, "SCHEDULE")]
    return {schedule.name: schedule for schedule in found}


def schedule_named(name: PipelineSchedule | str) -> Schedule:
    """The schedule with a name, "one_forward_one_backward" or "OneForwardOneBackward", or of the enum.

    Raises:
        TypeError: if it is neither a member of the enum nor a word.
        ValueError: if there is no such schedule; it lists those that there are.
    """
    if not isinstance(name, PipelineSchedule | str):
        raise TypeError(
            f"the pipeline schedule is {name!r}, a {type(name).__name__}; use a member of PipelineSchedule, or its name"
        )
    word = name.name if isinstance(name, PipelineSchedule) else name
    found = schedules_by_name().get(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", word).lower())
    if found is None:
        raise ValueError(f"there is no pipeline schedule {word!r}; use one of {', '.join(sorted(schedules_by_name()))}")
    return found
