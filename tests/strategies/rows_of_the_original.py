"""Tests of `ipu_multi_worker_strategy_test.py`, for two instances with one replica each."""

import pytest


class RowsOfTheOriginal:
    """The expected results of `strategy_program.py rows`.

    Subclasses have the parameter `variables`, "on_host" or "on_device", and the fixture `rows`: the results of the two
    instances for each row.
    """

    @pytest.fixture
    def place(self, variables):
        """Return the expected place of mirrored variables."""
        return {"on_host": "ndarray", "on_device": "device"}[variables]

    def test_workers_have_their_roles(self, rows):
        """Both instances run and initialise; the first one writes files."""
        assert rows["m01_m02"] == [[2, True, True, True, True], [2, True, True, False, False]]

    def test_variables_are_on_the_host_or_on_the_device(self, rows, place):
        """Replicas use the variables on their device."""
        assert rows["m04_m05"] == [["MirroredVariable", place, 2.0]] * 2

    def test_squares_are_summed_over_instances(self, rows):
        assert rows["m06"] == [5.0, 5.0]

    def test_a_mirrored_variable_begins_with_the_value_of_instance_0(self, rows):
        """The value is 1.0 everywhere, and the sum of the squares is 2.0."""
        assert rows["m07"] == [["MirroredVariable", 1.0, 2.0]] * 2

    def test_a_variable_synchronised_on_reading_is_averaged(self, rows):
        """The variable is on the device even with host variables: 1.0 at first, then the mean of 1 + 1 and 1 + 2."""
        assert rows["m08"] == [["SyncOnReadVariable", "device", 1.0, own, 2.5] for own in (2.0, 3.0)]

    def test_an_update_beside_gradients_on_the_replicas_averages_them(self, rows):
        """The total loss is 2.0; the gradients are averaged here, so w = 1 - 0.5."""
        assert rows["m10"] == [[2.0, 0.5]] * 2

    def test_momentum_has_one_slot_for_one_variable(self, rows):
        """The total loss is 2.0."""
        assert rows["m11_m12"] == [[1, 2.0, 0.5, 1.0]] * 2

    def test_a_weighted_sum_is_reduced_over_instances(self, rows):
        assert rows["m14"] == [6.0, 6.0]

    def test_a_training_shares_out_data_by_the_input_context(self, rows):
        """Each of the two pipelines reads its number; the gradient is the mean over the workers."""
        steps = [[1, -0.5], [2, 3.25], [3, -2.375]]
        assert rows["m15"] == [[2, 0, *steps], [2, 1, *steps]]

    def test_batch_normalisation_reduces_statistics_when_they_are_read(self, rows, place):
        """beta and gamma are mirrored."""
        for index, statistics in enumerate(rows["m16"]):
            assert statistics == {
                "places": [place, place],
                "normalised": [[1.0], [-1.0]],
                "local mean": [index + 1.0],
                "mean": [1.5],
                "variance": [2.5],
            }

    def test_a_compiled_function_can_contain_a_reduction(self, rows):
        """The result is twice the square of 1 + 4."""
        assert rows["m17"] == [50.0, 50.0]

    def test_a_loop_reads_a_data_set_from_a_function(self, rows):
        """Pipeline t has ten elements t."""
        assert rows["m22"] == [0, 10]
