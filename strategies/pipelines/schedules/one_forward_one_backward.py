"""A stage goes ahead by as many micro-batches as it must, and then takes forward and backward passes in turn."""

from __future__ import annotations

from itertools import chain, zip_longest

from strategies.pipelines.schedules.schedule import Schedule, any_number, forwards, merged, stages_after
from strategies.pipelines.timetable import Action, Kind, Places, Timetable


def one_forward_one_backward(mapping: Places, num_micro_batches: int, training: bool) -> Timetable:
    """As little memory as interleaved, for any number of stages on a device, and any number of micro-batches.

    With one stage on each device it is the order of the interleaved schedule. Source: PipeDream-flush, Narayanan et
    al., "Memory-Efficient Pipeline-Parallel DNN Training", 2021.
    """
    sequences = forwards(mapping, num_micro_batches)
    if training:
        sequences = [
            _in_turn(stage, forward, min(1 + stages_after(mapping, stage), num_micro_batches))
            for stage, forward in enumerate(sequences)
        ]
    return merged(sequences, mapping, num_micro_batches, training)


def _in_turn(stage: int, forward: list[Action], ahead: int) -> list[Action]:
    backward = [Action(Kind.BACKWARD, stage, action.micro_batch) for action in forward]
    turns = chain.from_iterable(zip_longest(backward, forward[ahead:]))
    return [*forward[:ahead], *(action for action in turns if action is not None)]


SCHEDULE = Schedule("one_forward_one_backward", one_forward_one_backward, any_number)
