"""What benchmarks compute from what they measured, what they refuse and what they print; nothing is measured here."""

import json
import sys
from argparse import ArgumentTypeError, Namespace

import numpy as np
import pytest
from benchmark_runs import BENCHMARKS

sys.path.append(str(BENCHMARKS))

import against_all_reduce  # noqa: E402
import all_reduce  # noqa: E402
import all_reduce_grpc  # noqa: E402
import all_reduce_horovod  # noqa: E402
import checkpoint  # noqa: E402
import contributions  # noqa: E402
import overlap  # noqa: E402
import sharded_state  # noqa: E402
import timing  # noqa: E402
import train_step  # noqa: E402
import training_task  # noqa: E402


def options_of(benchmark, monkeypatch, *words):
    """What a benchmark reads from its command line."""
    monkeypatch.setattr(sys, "argv", [f"{benchmark.__name__}.py", *words])
    return benchmark.read_options()


def way(ms, **checks):
    return {"ms": ms, "times_faster_than_mpi": 2 / ms, "has_same_bits": True, "is_close": True, **checks}


class TestAllReduce:
    @pytest.mark.parametrize(
        ("text", "nbytes"), [("4", 4), ("4096", 4096), ("64K", 1 << 16), ("64k", 1 << 16), ("1M", 1 << 20)]
    )
    def test_a_size_has_bytes_or_a_unit(self, text, nbytes):
        assert all_reduce.size(text) == nbytes

    @pytest.mark.parametrize("text", ["0", "-4", "6", "1023"])
    def test_a_size_that_is_not_whole_float32s_is_refused(self, text):
        with pytest.raises(ArgumentTypeError, match=f"{text} is not a multiple of 4 bytes"):
            all_reduce.size(text)

    @pytest.mark.parametrize(
        ("nbytes", "text"),
        [(4, "4 B"), (1536, "1536 B"), (1 << 16, "64 KiB"), (3 << 20, "3 MiB"), (100_000, "100000 B")],
    )
    def test_a_size_is_shown_in_its_largest_whole_unit(self, nbytes, text):
        assert all_reduce.in_units(nbytes) == text

    @pytest.mark.parametrize(
        ("words", "reason"),
        [
            (("--backends", "mpi,gloo"), "no backend here is called 'gloo'; use mpi, grpc, horovod"),
            (("--backends", "grpc", "--instances", "3"), "over gRPC a pair is measured: --instances 2"),
        ],
    )
    def test_what_cannot_be_measured_is_refused(self, words, reason, monkeypatch, capsys):
        with pytest.raises(SystemExit) as refused:
            options_of(all_reduce, monkeypatch, *words)
        assert refused.value.code == 2
        assert reason in capsys.readouterr().err

    def test_ways_of_ours_have_to_have_the_bits_and_peers_to_be_close(self):
        ways = {"window": way(1.0, has_same_bits=False), "mpi": way(2.0, has_same_bits=False)}
        row = {"bytes": 8, "local_replicas": 2, "ways": {**ways, "gloo": way(4.0, is_close=False)}}
        assert all_reduce.faults(row, all_reduce.KEEPS_ORDER) == [
            "window: the sum of 8 bytes, 2 local replicas is wrong",
            "gloo: the sum of 8 bytes, 2 local replicas is wrong",
        ]

    def test_of_ways_over_horovod_ours_alone_has_to_have_the_bits(self):
        ways = {name: way(1.0, has_same_bits=False) for name in all_reduce_horovod.COLUMNS}
        row = {"bytes": 8, "local_replicas": 1, "ways": ways}
        assert [fault.split(":")[0] for fault in all_reduce.faults(row, all_reduce_horovod.KEEPS_ORDER)] == ["window"]

    def test_over_grpc_the_bits_have_to_be_the_same(self):
        assert all_reduce_grpc.faults({"bytes": 8, "has_same_bits": True}) == []
        assert all_reduce_grpc.faults({"bytes": 8, "has_same_bits": False}) == ["grpc: the sum of 8 bytes is wrong"]

    def test_a_line_has_a_cell_for_every_way_and_a_dash_for_one_that_is_missing(self, capsys):
        ways = {name: way(0.5 * number) for number, name in enumerate(("window", "window_private", "ring", "mpi"), 1)}
        row = {"bytes": 1024, "local_replicas": 2, "instances": 3, "ways": ways}
        all_reduce.print_header(3)
        all_reduce.print_row({**row, "bound_ms": 0.25, "bandwidth_gb_per_s": 10.5})
        above, titles, cells = capsys.readouterr().out.splitlines()
        assert above.startswith("3 instances, one core each; medians in ms")
        assert titles.split() == ["size", "replicas", "window", "w.", "private", "ring", "mpi", "gloo", "bound", "GB/s"]
        assert cells.split() == [
            *("1", "KiB", "3", "x", "2", "0.5000", "(4.00x)", "1.0000", "(2.00x)", "1.5000", "(1.33x)"),
            *("2.0000", "(1.00x)", "-", "0.2500", "10.5"),
        ]
        assert len(titles) == len(cells)

    def test_over_grpc_a_line_has_times_and_bandwidths(self, capsys):
        row = {"ms": {"grpc": 3.0, "bare": 2.0}, "gb_per_s": {"grpc": 0.5, "bare": 0.75}, "grpc_over_bare": 1.5}
        all_reduce_grpc.print_row(row, "1 MiB")
        all_reduce_grpc.print_memory({"extra_memory_bytes": 3 << 19}, "3 MiB")
        cells, memory = capsys.readouterr().out.splitlines()
        assert cells.split() == ["1", "MiB", "3.000", "(0.500)", "2.000", "(0.750)", "1.50"]
        assert memory == "an all-reduce of 3 MiB takes 1.5 MiB besides its arrays, at its peak"

    def test_sums_are_compared_with_that_of_the_tree(self):
        right = contributions.tree_sum(3, 5)
        assert contributions.sum_checks(right, right) == {"has_same_bits": True, "is_close": True}
        rounded = np.nextafter(right, np.float32(np.inf))
        assert contributions.sum_checks(rounded, right) == {"has_same_bits": False, "is_close": True}
        assert contributions.sum_checks(right + 1, right) == {"has_same_bits": False, "is_close": False}


class TestAgainstAllReduce:
    TIMES = {"before": [4.0, 8.0, 2.0, 5.0, 4.0], "now": [2.0, 8.0, 3.0, 5.0, 1.0]}

    def test_versions_are_compared_turn_by_turn(self):
        row = against_all_reduce.compared(self.TIMES)
        assert row["us"] == {"before": 4.0, "now": 3.0}
        assert (row["now_over_before"], row["quarters"], row["least_over_least"]) == (1.0, [0.5, 1.0], 0.5)

    def test_what_is_now_has_to_have_the_bits_of_the_tree_and_what_was_before_the_sum(self):
        class Answers:
            def __init__(self, **checks):
                self.checks = {"has_same_bits": False, "is_close": False, **checks}

            def ask(self, do, **request):
                return [self.checks, {"has_same_bits": True, "is_close": True}] if do == "prepare" else [1.0, 0.5]

        case, options = {"over": "grpc", "nbytes": 1 << 20, "replicas": 2}, Namespace(turn_s=1.0, rounds=2)
        rounded = {"before": Answers(is_close=True), "now": Answers(is_close=True)}
        row = against_all_reduce.row_of(rounded, case, options)
        assert against_all_reduce.faults(row) == ["now: the sum over grpc, 1 MiB, 2 local replicas is wrong"]
        wrong = {"before": Answers(), "now": Answers(has_same_bits=True)}
        row = against_all_reduce.row_of(wrong, case, options)
        assert against_all_reduce.faults(row) == ["before: the sum over grpc, 1 MiB, 2 local replicas is wrong"]

    def test_a_line_has_a_cell_below_every_title(self):
        row = {"over": "ring", "nbytes": 1 << 16, "replicas": 2, **against_all_reduce.compared(self.TIMES)}
        cells = "ring 64 KiB 2 4.00 3.00 1.000 0.50 - 1.00 0.500"
        assert against_all_reduce.formatted(row).split() == cells.split()


class TestTrainStep:
    TIMES = {"ours": [4.0, 2.0, 9.0], "dataset": [5.0, 5.0, 6.0], "alone": [2.0, 2.0, 1.0]}

    def test_ratios_follow_from_the_medians(self):
        row = train_step.make_row("cnn", self.TIMES, {})
        assert row["ms_per_step"] == {"ours": 4.0, "dataset": 5.0, "alone": 2.0}
        assert (row["ours_over_alone"], row["dataset_over_alone"], row["ddp_over_ours"]) == (2.0, 2.5, None)
        assert row["rounds_ms"] == self.TIMES

    def test_ratios_to_peers_are_there_where_both_were_measured(self):
        row = train_step.make_row("cnn", {**self.TIMES, "over_hvd": [6.0], "hvd": [8.0], "hvd_tuned": [3.0]}, {})
        assert (row["hvd_over_ours"], row["hvd_tuned_over_ours"]) == (2.0, 0.75)
        assert (row["over_hvd_over_hvd"], row["over_hvd_over_hvd_tuned"]) == (0.75, 2.0)
        assert "tensorflow_over_ours" not in row

    def test_all_ways_have_to_do_the_same_work(self):
        losses = {"ours": [2.0, 1.0], "alone": [2.0, 7.0], "ddp": [2.0, 1.0004]}
        assert train_step.check(losses, [["a", "a"]]) == {
            "instances have the same variables": True,
            "alone begins with the same loss": True,
            "ddp has the same losses": True,
        }
        losses = {"ours": [2.0, 1.0], "alone": [2.1, 1.0], "ddp": [2.0, 1.1]}
        assert not any(train_step.check(losses, [["a", "a"], ["a", "b"]]).values())

    def test_a_turn_takes_as_long_as_that_of_the_slowest_and_has_the_mean_loss(self):
        class Answers:
            def ask(self, **request):
                assert request == {"do": "placed", "steps": 4}
                return [{"seconds": 0.5, "losses": [1.0, 3.0]}, {"seconds": 2.0, "losses": [2.0, 5.0]}]

        assert train_step.take_turn(Answers(), "ours", 4) == (500.0, [1.5, 4.0])

    @pytest.mark.parametrize(
        ("words", "columns"),
        [
            ((), ["ours", "dataset", "alone", "ddp"]),
            (("--against", "tensorflow"), ["ours", "dataset", "alone", "tf"]),
            (("--against", "horovod"), ["ours", "dataset", "alone", "over hvd", "hvd", "tuned"]),
            (("--against", "horovod", "--strategy", "horovod"), ["ours", "dataset", "alone", "hvd", "tuned"]),
        ],
    )
    def test_there_is_a_column_for_every_way(self, words, columns, monkeypatch):
        assert list(train_step.time_columns(options_of(train_step, monkeypatch, *words))) == columns

    def test_a_line_has_a_cell_for_every_column_and_a_dash_for_what_was_not_measured(self, monkeypatch, capsys):
        options = options_of(train_step, monkeypatch)
        train_step.print_header(options)
        train_step.print_row(train_step.make_row("cnn", self.TIMES, {}), options)
        above, titles, cells = capsys.readouterr().out.splitlines()
        assert above == "2 instances, one core and one replica of 64 each; ms per step, medians"
        assert titles.split() == [
            *("model", "ours", "dataset", "alone", "ddp", "ours/alone", "dataset/alone", "ddp/ours"),
        ]
        assert cells.split() == ["cnn", "4.00", "5.00", "2.00", "-", "2.000", "2.500", "-"]
        assert len(titles) == len(cells)

    def test_tensorflow_is_compared_with_the_strategy_over_grpc(self, monkeypatch):
        assert options_of(train_step, monkeypatch, "--against", "tensorflow").strategy == "multi-worker"
        assert options_of(train_step, monkeypatch).strategy == "popdist"

    def test_a_mechanism_is_for_the_strategy_that_has_several(self, monkeypatch, capsys):
        with pytest.raises(SystemExit):
            options_of(train_step, monkeypatch, "--strategy", "multi-worker", "--strategy-mechanism", "ring")
        assert "--strategy-mechanism is for --strategy popdist" in capsys.readouterr().err

    @pytest.mark.parametrize("library", ["tensorflow", "horovod"])
    def test_a_library_that_was_asked_for_and_is_missing_is_refused(self, library, monkeypatch):
        options = options_of(train_step, monkeypatch, "--against", library, f"--{library}-python", "/bin/false")
        with pytest.raises(SystemExit, match=f"^/bin/false cannot import {library}; .* --{library}-python PATH"):
            train_step.find_pythons(options)


class TestOverlap:
    GRADIENT_BYTES = 4 * (784 * 1024 + 1024 + 1024 * 1024 + 1024 + 1024 * 10 + 10)
    SENT = {"float32": [100.0, 90.0], "int8": [20.0, 25.0]}

    def row(self, ms, fingerprints=None):
        return {
            "batch_size": 3,
            "ms_per_step": {"compute": 4.0, "communication": 6.0, **ms},
            "sent_bytes_per_step": self.SENT,
            "fingerprints": fingerprints or {},
        }

    def test_communication_is_the_bytes_of_the_gradients_over_the_rate(self):
        ms = overlap.communication_ms(Namespace(bytes_per_s=125e6))
        assert ms == pytest.approx(1e3 * self.GRADIENT_BYTES / 125e6)

    def test_streaming_is_compared_with_what_takes_longest_and_with_plain(self):
        found = overlap.compare_streaming(self.row({"streaming": 9.0, "plain": 12.0}, {"streaming": ["a", "a"]}))
        assert found == {
            "ideal_ms": 6.0,
            "streaming_over_ideal": 1.5,
            "saved_by_streaming": 0.25,
            "has_same_bits": True,
        }

    @pytest.mark.parametrize("differs", [{"streaming": ["a", "b"]}, {"streaming": ["a", "a"], "plain": ["b", "b"]}])
    def test_both_workers_and_both_ways_have_to_have_the_same_variables(self, differs):
        assert not overlap.compare_streaming(self.row({"streaming": 1.0, "plain": 1.0}, differs))["has_same_bits"]

    def test_a_dtype_is_compared_by_the_bytes_of_the_worker_that_sent_more(self):
        apart = {"float32": ["a", "a"], "int8": ["b", "b"]}  # a dtype may have variables of its own
        found = overlap.compare_transfers(self.row({"float32": 12.0, "int8": 8.0}, apart), "int8")
        assert found == {"faster": 1.5, "bytes_over_float32": 0.25, "has_same_bits": True}
        cells = overlap.cells(self.row({"float32": 12.0, "int8": 8.0}) | found, "int8")
        assert (cells["faster"], cells["MB ratio"], cells["batch"]) == ("1.50x", "0.250", "3")

    def test_the_workers_of_a_dtype_have_to_have_the_same_variables(self):
        apart = {"float32": ["a", "a"], "int8": ["b", "c"]}
        assert not overlap.compare_transfers(self.row({"float32": 1.0, "int8": 1.0}, apart), "int8")["has_same_bits"]

    def test_a_rate_that_is_none_is_refused(self, monkeypatch, capsys):
        with pytest.raises(SystemExit):
            options_of(overlap, monkeypatch, "--rate", "fast")
        assert "rate" in capsys.readouterr().err


def test_a_checkpoint_row_has_a_cell_below_every_title(capsys):
    ms = {"plain": 2.0, "saving": 3.0, "blocked": 0.5}
    ratios = {"saving_over_plain": 1.5, "blocked_over_plain": 0.25, "made_over_due": 0.8}
    checkpoint.print_row({"instances": 2, "ms_per_step": ms, **ratios})
    assert capsys.readouterr().out.split() == ["2", "2.00", "3.00", "1.500", "0.50", "0.250", "80%"]


def test_a_turn_with_checkpoints_counts_what_instance_0_made():
    class Answers:
        def ask(self, **request):
            assert request == {"do": "saved", "every": 5, "steps": 10}
            return [{"seconds": 0.2, "blocked_s": 0.05, "made": 2}, {"seconds": 0.5}]

    assert checkpoint.take_turn(Answers(), 10, do="saved", every=5) == (50.0, 5.0, 0.2)


def test_bytes_of_sharded_state_are_shown_in_mebibytes_and_ratios_as_they_are(capsys):
    figures = {"state_bytes": 3 << 20, "peak_bytes": 5 << 19, "training_bytes": 1 << 20, "ms_per_step": 7.0}
    sharded_state.print_line(2, "whole", figures, sharded_state.MIB)
    sharded_state.print_line(2, "ratio", dict.fromkeys(figures, 0.5), 1)
    whole, ratio = capsys.readouterr().out.splitlines()
    assert whole.split() == ["2", "whole", "3.000", "2.500", "1.000", "7.000"]
    assert ratio.split() == ["2", "ratio", "0.500", "0.500", "0.500", "0.500"]


def test_figures_are_written_with_what_they_depend_on(tmp_path):
    path = tmp_path / "figures.json"
    options = Namespace(json=str(path), rounds=3, folder="of no matter")
    timing.write_figures(options, ["rounds"], {"cores": 2}, timing.OtherLoad(), rows=[1, 2])
    written = json.loads(path.read_text())
    assert isinstance(written.pop("other_load"), float)
    assert written == {"machine": {"cores": 2}, "rounds": 3, "rows": [1, 2]}


def test_a_rank_that_fails_ends_the_benchmark():
    with pytest.raises(SystemExit, match="ended with 7; the reason is above"):
        list(timing.output_lines(["sh", "-c", "echo line; exit 7"], 60.0))
    assert list(timing.output_lines(["sh", "-c", "echo line; echo next"], 60.0)) == ["line\n", "next\n"]


def test_every_replica_of_the_task_has_batches_of_its_own():
    first, second = (training_task.batches_of(replica, 3, 2) for replica in range(2))
    assert len(first) == len(second) == training_task.BATCHES
    assert all(len(leaf) == 3 for batch in first for leaf in batch.values())
    assert not any(np.array_equal(a["image"], b["image"]) for a, b in zip(first, second, strict=True))
