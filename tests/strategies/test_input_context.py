"""Input contexts: facts about the reader for a function that makes a data set."""

import pytest

from strategies import InputContext


def test_replicas_share_a_global_batch_evenly():
    assert InputContext(num_input_pipelines=2, num_replicas_in_sync=6).get_per_replica_batch_size(18) == 3
    assert InputContext().get_per_replica_batch_size(5) == 5


@pytest.mark.parametrize(("size", "advice"), [(20, "use 18 or 24"), (5, "use 6"), (7, "use 6 or 12")])
def test_an_indivisible_batch_is_refused_with_the_possible_sizes(size, advice):
    with pytest.raises(ValueError, match=f"of {size} is not divisible by 6 replicas; {advice}$"):
        InputContext(num_replicas_in_sync=6).get_per_replica_batch_size(size)


@pytest.mark.parametrize(
    ("numbers", "error", "words"),
    [
        ((0, 0, 1), ValueError, "num_input_pipelines is 0"),
        ((1, 0, 0), ValueError, "num_replicas_in_sync is 0"),
        ((2, -1, 1), ValueError, "input_pipeline_id is -1"),
        ((2, 2, 1), ValueError, "input_pipeline_id is 2 of 2 pipelines; they are numbered 0 to 1"),
        ((2.0, 0, 1), TypeError, "num_input_pipelines is 2.0"),
    ],
)
def test_impossible_numbers_are_refused(numbers, error, words):
    with pytest.raises(error, match=words):
        InputContext(*numbers)


def test_the_last_pipeline_number_is_accepted():
    assert InputContext(3, 2, 3).input_pipeline_id == 2
