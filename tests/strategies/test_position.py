"""Positions in a data set, as they are saved."""

import json

import pytest

from strategies import Position

POSITION = Position(2, 7, seed=3, batch_size=4, total_replicas=6, length=None, shuffle=False, remainder="pad")


def test_a_position_survives_json():
    assert Position.from_dict(json.loads(json.dumps(POSITION.to_dict()))) == POSITION


def test_entries_missing_in_older_positions_have_their_former_values():
    old = {name: value for name, value in POSITION.to_dict().items() if name not in ("shuffle", "remainder")}
    assert (Position.from_dict(old).shuffle, Position.from_dict(old).remainder) == (True, "drop")


@pytest.mark.parametrize("values", [{}, {"epoch": 1}, POSITION.to_dict() | {"instances": 2}])
def test_another_dictionary_is_refused(values):
    with pytest.raises(
        ValueError, match="is not a position of a data set; a position has epoch, step, seed, batch_size"
    ):
        Position.from_dict(values)
