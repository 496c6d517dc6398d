"""Metrics merged from parts."""

import math
from pathlib import Path

import jax
import numpy as np
import pytest

from strategies import Evaluation, Mean


class TestAMean:
    def test_the_mean_of_merged_parts_is_that_of_the_whole(self):
        parts = [Mean(np.float64(6), np.float64(3)), Mean(np.float64(10), np.float64(1))]
        assert parts[0].merge(parts[1]).value == 4.0

    def test_a_scalar_mean_is_a_float_and_others_are_arrays(self):
        assert type(Mean(np.float32(1), np.float32(4)).value) is float
        of_classes = Mean(np.array([1.0, 6.0]), np.array([2.0, 3.0])).value
        assert of_classes.tolist() == [0.5, 2.0]

    def test_a_mean_of_nothing_is_nan_without_a_warning(self):
        assert math.isnan(Mean(np.float64(0), np.float64(0)).value)

    def test_a_mean_is_made_of_values_and_their_weights(self):
        mean = jax.jit(Mean.of)(np.float32([[1, 10], [2, 20], [4, 40]]), np.float32([1, 0, 0.5]))
        assert np.asarray(mean.total).tolist() == [3.0, 30.0]
        assert mean.count == 1.5

    def test_masked_values_are_left_out_even_if_nan(self):
        mean = Mean.of(np.float32([1, np.nan, np.inf, 3]), np.array([True, False, False, True]))
        assert mean.value == 2.0

    def test_a_mean_counts_truth_values(self):
        assert Mean.of(np.array([True, False, True, True]), np.ones(4, bool)).value == 0.75

    def test_a_mean_in_float64_loses_nothing_beside_large_numbers(self):
        large = Mean(np.float32(2**24), np.float32(1)).widened()
        assert large.merge(Mean(np.float32(1), np.float32(1)).widened()).total == 2**24 + 1


class TestAnEvaluation:
    @pytest.fixture
    def evaluation(self):
        return Evaluation({"loss": Mean(np.float64(3), np.float64(2)), "files": Path("a")}, 2)

    def test_an_evaluation_has_the_values_of_means_and_other_merged_objects(self, evaluation):
        assert dict(evaluation) == {"loss": 1.5, "files": Path("a")}
        assert evaluation.merged["loss"].count == 2

    def test_the_repr_shows_the_values(self, evaluation):
        assert repr(evaluation) == f"Evaluation({{'loss': 1.5, 'files': {Path('a')!r}}}, rows=2)"
        assert len(evaluation) == 2
