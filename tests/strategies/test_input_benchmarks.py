"""The original's benchmarks of input: results and refusals."""

import json
import logging

import numpy as np
import pytest

from strategies import EndOfDataError, InfeedQueue, dataset_benchmark, infeed_benchmark

FIGURES = ["elements_processed", "total_bytes_processed", "time_elapsed", "elements_per_second", "bandwidth"]


def increasing(number, shape):
    """Return a data set of ones, twos, threes, ..."""
    return (np.full(shape, value, np.float32) for value in range(1, number + 1))


class TestFunctions:
    """Benchmark functions of the original."""

    @pytest.mark.parametrize("do_memcpy", [True, False])
    def test_a_data_set_is_measured(self, do_memcpy):
        result = json.loads(dataset_benchmark(increasing(10_000, (4, 4)), 10, 1000, do_memcpy=do_memcpy))
        assert len(result["epochs"]) == 10
        for epoch in result["epochs"]:
            assert sorted(epoch) == sorted(FIGURES)
            assert all(isinstance(figure, float) and figure > 0 for figure in epoch.values())
            assert (epoch["elements_processed"], epoch["total_bytes_processed"]) == (1000, 64_000)
            seconds = epoch["time_elapsed"]
            assert epoch["elements_per_second"] == pytest.approx(1000 / seconds, rel=1e-5)
            assert epoch["bandwidth"] == pytest.approx(64_000 / (1e9 * seconds), rel=1e-5)

    @pytest.mark.parametrize("do_memcpy", [True, False])
    def test_an_infeed_is_measured(self, do_memcpy):
        infeed = InfeedQueue(increasing(5 * 256, (4, 4)))
        result = json.loads(infeed_benchmark(infeed, 5, 256, do_memcpy=do_memcpy))
        assert len(result["epochs"]) == 5
        for epoch in result["epochs"]:
            assert sorted(epoch) == sorted(FIGURES)
            assert all(isinstance(figure, float) and figure > 0 for figure in epoch.values())
            assert (epoch["elements_processed"], epoch["total_bytes_processed"]) == (256, 256 * 64)

    def test_a_distributed_data_set_begins_anew(self, strategy):
        dataset = strategy.distribute_dataset({"x": np.ones((50, 3), np.uint8)}, batch_size=4)
        (epoch,) = json.loads(dataset_benchmark(dataset, 1, elements_per_epoch=7))["epochs"]
        assert (epoch["elements_processed"], epoch["total_bytes_processed"]) == (7, 7 * 4 * 4 * 3)

    def test_a_dimension_of_size_0_is_refused(self):
        words = "Detected a tensor in the dataset with a dimension of size 0"
        with pytest.raises(ValueError, match=words):
            dataset_benchmark(increasing(10, (4, 0)), 1, 5)
        with pytest.raises(ValueError, match=words):
            infeed_benchmark(InfeedQueue(increasing(10, (4, 0))), 1, 5)

    @pytest.mark.parametrize(
        ("arguments", "error", "words"),
        [
            ((0, 5), ValueError, "number_of_epochs is 0; it must be at least 1"),
            ((1, 0), ValueError, "elements_per_epochs is 0; it must be at least 1"),
            ((1.5, 5), TypeError, "number_of_epochs is 1.5; an integer"),
            ((1, "5"), TypeError, "elements_per_epochs is '5'; an integer"),
            ((1,), TypeError, "give the elements of an epoch once"),
            ((2, 6), ValueError, "the data set ended after 10 of 12 elements"),
        ],
    )
    def test_bad_arguments_are_raised_and_not_returned(self, arguments, error, words):
        with pytest.raises(error, match=words):
            dataset_benchmark(increasing(10, (2,)), *arguments)
        infeed = InfeedQueue(increasing(10, (2,)))
        with pytest.raises(EndOfDataError if "ended" in words else error, match=None if "ended" in words else words):
            infeed_benchmark(infeed, *arguments)

    @pytest.mark.parametrize("kind", ["iterable", "function"])
    def test_batches_that_are_collective_calls_are_not_read_ahead(self, on_instances, kind):
        """Instances take the same number of batches, and call each other in the same order afterwards."""
        elements = [np.float32(number) for number in range(100)]

        def on_one(strategy):
            if kind == "iterable":
                dataset = strategy.distribute_dataset(elements, batch_size=2)
            else:
                dataset = strategy.distribute_datasets_from_function(lambda context: elements)
            before = strategy.communicator.calls_made
            dataset_benchmark(dataset, 2, 5)
            calls = strategy.communicator.calls_made - before
            return calls, float(strategy.reduce("sum", np.float32(1)))

        assert on_instances(2, 2, on_one) == [(10, 2.0)] * 2

    def test_other_types_than_data_sets_are_refused(self):
        with pytest.raises(TypeError, match="is a int, which cannot be iterated"):
            dataset_benchmark(3, 1, 1)
        with pytest.raises(TypeError, match="infeed_queue is a list; use a strategies.InfeedQueue"):
            infeed_benchmark([], 1, 1)
        with pytest.raises(TypeError, match="is a str; use arrays of numbers"):
            dataset_benchmark(["a"], 1, 1)

    def test_results_and_epochs_are_logged(self, caplog):
        caplog.set_level(logging.INFO)
        dataset_benchmark(increasing(10, (2,)), 2, 5)
        said = [record.getMessage() for record in caplog.records]
        assert [line.split()[0] for line in said] == ["Processed:", "Bandwidth:", "Dataset"] * 2
        assert said[0].endswith(" elements/second.")
        assert said[1].endswith(" GB/s.")
        assert said[5] == "Dataset iterator completed epoch 1."
        caplog.clear()
        dataset_benchmark(increasing(10, (2,)), 1, 5, print_stats=False)
        assert [record.getMessage() for record in caplog.records] == ["Dataset iterator completed epoch 0."]
