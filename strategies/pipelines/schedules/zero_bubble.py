"""The backward pass in two parts: other stages wait for that of the inputs, and that of the weights fills bubbles."""

from __future__ import annotations

from itertools import chain, zip_longest

from strategies.pipelines.schedules.schedule import Schedule, any_number, forwards, merged, stages_after
from strategies.pipelines.timetable import Action, Kind, Places, Timetable


def zero_bubble(mapping: Places, num_micro_batches: int, training: bool) -> Timetable:
    """A third of the bubbles of one forward, one backward, if the three parts of a stage take as long as each other.

    A stage with k stages before it is behind by k micro-batches with the parts for the weights; so every stage keeps
    as many micro-batches as there are stages. Source: ZB-H1 of Qi et al., "Zero Bubble Pipeline Parallelism", 2023.
    """
    sequences = forwards(mapping, num_micro_batches)
    if training:
        sequences = [
            _in_turn(stage, forward, min(1 + stages_after(mapping, stage), num_micro_batches))
            for stage, forward in enumerate(sequences)
        ]
    return merged(sequences, mapping, num_micro_batches, training)


def _in_turn(stage: int, forward: list[Action], ahead: int) -> list[Action]:
    inputs = [Action(Kind.BACKWARD_INPUTS, stage, action.micro_batch) for action in forward]
    weights = [Action(Kind.BACKWARD_WEIGHTS, stage, action.micro_batch) for action in forward]
    late: list[Action | None] = [None] * stage
    turns = chain.from_iterable(zip_longest(inputs, [*late, *weights], forward[ahead:]))
    return [*forward[:ahead], *(action for action in turns if action is not None)]


SCHEDULE = Schedule("zero_bubble", zero_bubble, any_number)
