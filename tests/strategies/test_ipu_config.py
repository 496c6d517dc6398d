"""`IPUConfig`: tests of the original, the effect of each attribute, and the page about it."""

from __future__ import annotations

import logging
import re
import threading

import numpy as np
import optax
import pytest
from pages import page_named

import strategies
from strategies.compat.pipelining_ops import pipeline
from strategies.config import (
    DeviceConnectionType,
    IPUConfig,
    SelectionOrder,
    StochasticRoundingBehaviour,
    configure_ipu_system,
    get_ipu_config,
    reset_ipu_configuration,
)
from strategies.defaults import Defaults, in_force
from strategies.jax.options import configured
from strategies.jax.programs.compilation import use_executable_cache
from strategies.pipelines.pipelining import RecomputationMode

PAGE = page_named("config_attributes.md")


@pytest.fixture
def config():
    """Provide a configuration that is reset after the test."""
    yield IPUConfig()
    reset_ipu_configuration()


@pytest.fixture
def configure(config):
    """Provide a function that applies attributes given by their full names."""

    def put(**values):
        config.from_dict({**config.to_dict(), **{name.replace("__", "."): value for name, value in values.items()}})
        config.configure_ipu_system()
        return config

    return put


class TestRows:
    def test_the_number_of_processes_is_0_by_default(self, config):
        own = config.experimental.multi_replica_distribution
        assert (own.process_count, own.process_index) == (0, 0)
        own.process_count, own.process_index = 2, 1
        assert (config.check().process_count, config.check().process_index) == (2, 1)

    @pytest.mark.parametrize(("count", "index"), [(1, 5), (1, -1), (2, 2), (-1, 0)])
    def test_a_process_index_out_of_bounds_is_refused(self, configure, count, index):
        name = "experimental__multi_replica_distribution__process_"
        with pytest.raises(ValueError, match=r"process_index must be in the range \[0, experimental.*, but is"):
            configure(**{f"{name}count": count, f"{name}index": index})
        assert in_force() == Defaults()

    @pytest.mark.parametrize("name", ["auto_select_ipus", "select_ipus"])
    def test_numbers_lists_and_tuples_of_ipus_are_stored_and_truth_values_refused(self, config, name):
        for value in (2, [2], (2, 3), []):
            setattr(config, name, value)
            assert getattr(config, name) == value
        for value in (True, [True], 2.0, "2"):
            with pytest.raises(TypeError, match=f"Trying to set {name} to .*, but it must be of type int | list"):
                setattr(config, name, value)

    def test_auto_select_and_select_ipus_exclude_each_other(self, configure):
        with pytest.raises(ValueError, match="Only one of `auto_select_ipus` and `select_ipus` can be set"):
            configure(auto_select_ipus=1, select_ipus=1)

    def test_groups_of_normalisation_exclude_io_tiles(self, configure):
        size = {"norms__experimental__distributed_batch_norm_replica_group_size": 2}
        configure(**size)
        with pytest.raises(ValueError, match="not supported with I/O tiles"):
            configure(**size, io_tiles__num_io_tiles=10)

    def test_placing_operations_needs_io_tiles(self, configure):
        with pytest.raises(ValueError, match=r"Cannot place ops on I/O tiles when io_tiles\.num_io_tiles == 0"):
            configure(io_tiles__place_ops_on_io_tiles=True)
        configure(io_tiles__place_ops_on_io_tiles=True, io_tiles__num_io_tiles=10)

    def test_attributes_of_the_original_are_found_and_suggested(self, config):
        with pytest.raises(ValueError, match="Did you mean 'auto_select_ipus'"):
            config.auto_select_ipu = 4
        with pytest.raises(ValueError, match="Did you mean 'experimental.multi_replica_distribution.process_count'"):
            config.process_count = 4

    def test_moved_attributes_are_deprecated(self, config, caplog):
        config.optimizations.enable_fast_math = True
        assert caplog.messages[0].endswith(
            "has been deprecated: 'enable_fast_math' has been moved to 'optimizations.math.fast'."
        )

    def test_json_restores_a_configuration(self, config):
        config.auto_select_ipus, config.selection_order = [2, 2], SelectionOrder.HOOF
        other = IPUConfig()
        other.from_json(config.to_json())
        assert other == config
        assert other.to_dict()["selection_order"] == 3

    def test_getting_a_configuration_before_one_is_set_is_refused(self, config):
        with pytest.raises(RuntimeError, match="No IPU devices configured"):
            get_ipu_config()
        reset_ipu_configuration()  # is no error

    def test_another_configuration_is_refused_without_a_reset(self, config, caplog):
        config.auto_select_ipus = 1
        configure_ipu_system(config)
        configure_ipu_system(config, reset_configuration=False)  # the same
        assert caplog.messages == []
        config.auto_select_ipus = 2
        with pytest.raises(RuntimeError, match="already configured differently"):
            configure_ipu_system(config, reset_configuration=False)
        assert get_ipu_config().auto_select_ipus == 1
        configure_ipu_system(config)
        assert get_ipu_config().auto_select_ipus == 2
        assert caplog.messages == ["Resetting existing IPU configuration before applying new configuration"]

    def test_any_configuration_is_accepted_after_a_reset(self, config, caplog):
        configure_ipu_system(config)
        reset_ipu_configuration()
        config.auto_select_ipus = 2
        configure_ipu_system(config, device="/device:CPU:0", reset_configuration=False)
        assert caplog.messages == []


@pytest.mark.parametrize("kind", ["NEVER", "PRE_COMPILE"])
def test_a_device_that_is_not_attached_needs_a_version(config, kind):
    config.device_connection.type = DeviceConnectionType[kind]
    with pytest.raises(ValueError, match=r"device_connection\.version must be set when device_connection\.type is"):
        config.configure_ipu_system()


def test_only_a_configuration_is_put_in_force(config):
    with pytest.raises(TypeError, match="the configuration is {}, a dict; it must be an IPUConfig"):
        configure_ipu_system({})


def test_an_attribute_mutated_to_another_type_is_refused(config):
    config.auto_select_ipus.append("2")
    with pytest.raises(TypeError, match="Trying to set auto_select_ipus to"):
        config.configure_ipu_system()


def test_later_changes_are_not_in_force(configure):
    config = configure(auto_select_ipus=[2])
    config.auto_select_ipus[0] = 4
    get_ipu_config().auto_select_ipus[0] = 4
    assert (get_ipu_config().auto_select_ipus, in_force().selection.ipus) == ([2], 2)


def test_attributes_without_an_effect_are_named_once(configure, caplog):
    caplog.set_level(logging.DEBUG, "strategies.config")
    configure(scheduling__maximum_scheduler_lookahead_depth=6, auto_select_ipus=2)
    configure(scheduling__maximum_scheduler_lookahead_depth=7, pooling__poplar_options={"a": "b"})
    assert [message for message in caplog.messages if "kept" in message] == [
        "kept without effect: scheduling.maximum_scheduler_lookahead_depth",
        "kept without effect: pooling.poplar_options",
    ]


class Rows:
    """A source with random access that knows the thread of the last read."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        self.reader = threading.current_thread()
        return np.float32(index)


class TestDefaults:
    def test_a_new_configuration_only_disables_recomputation(self, config):
        assert config.check() == Defaults(recomputes=False)

    @pytest.mark.parametrize("name", ["inv", "div0", "oflo", "set_all"])
    def test_trainers_refuse_gradients_that_are_not_finite(self, configure, name):
        configure(**{f"floating_point_behaviour__{name}": True})
        assert configured(0, None, 0, {}, in_force()).check_numerics

    def test_trainers_that_decline_or_scale_losses_do_not_check_gradients(self, configure):
        configure(floating_point_behaviour__inv=True)
        assert not configured(0, False, 0, {}, in_force()).check_numerics
        assert not configured(0, None, 0, {"loss_scaling": "dynamic"}, in_force()).check_numerics

    @pytest.mark.parametrize("value", [True, 1, 2])
    def test_trainers_round_stochastically(self, configure, value):
        configure(floating_point_behaviour__esr=value)
        assert configured(0, None, 0, {}, in_force()).stochastic_rounding
        assert not configured(0, None, 0, {"stochastic_rounding": False}, in_force()).stochastic_rounding

    def test_set_all_switches_on_all_floating_point_behaviour(self, config):
        config.floating_point_behaviour.set_all = True
        assert config.floating_point_behaviour.esr is StochasticRoundingBehaviour.OFF
        assert (config.check().rounds_stochastically, config.check().checks_numerics) == (True, True)

    @pytest.mark.parametrize(("size", "elements"), [(128, 32), (0, 1), (5, 2), (4096, 1024)])
    def test_smaller_state_than_remote_tensors_stays_whole(self, configure, size, elements):
        configure(optimizations__minimum_remote_tensor_size=size)
        assert configured(0, None, 0, {}, in_force()).min_elements_for_sharding == elements
        assert configured(0, None, 0, {"min_elements_for_sharding": 3}, in_force()).min_elements_for_sharding == 3

    def test_a_trainer_reads_the_configuration(self, configure, strategy):
        configure(floating_point_behaviour__oflo=True)

        def loss_fn(variables, batch, key):
            return (variables * batch).sum()

        trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.1))
        with pytest.raises(strategies.NonFiniteGradientError):
            trainer.step(trainer.init(np.float32(1)), np.full((4, 1), np.inf, np.float32))

    def test_data_are_not_prepared_ahead(self, configure, strategy):
        configure(optimizations__prefetch_data_streams=False)
        assert strategies.InfeedQueue(np.ones((2, 1), np.float32)).prefetch_depth == 1
        assert strategies.InfeedQueue(np.ones((2, 1), np.float32), prefetch_depth=4).prefetch_depth == 4
        for given, ahead in ((None, False), (1, True)):
            rows = Rows()
            next(strategy.distribute_dataset(rows, batch_size=1, prefetch=given).epoch(0))
            assert (rows.reader is not threading.current_thread()) is ahead

    def test_pipelines_recompute(self, configure):
        assert not strategies.Pipelining([0, 1]).recomputes
        configure(allow_recompute=True)
        made = strategies.Pipelining([0, 1])
        reset_ipu_configuration()
        assert made.recomputes
        assert made.terms["recompute"]

    def test_an_explicit_recompute_of_a_pipeline_wins(self, configure):
        configure(allow_recompute=True)
        assert not strategies.Pipelining([0, 1], recompute=False).recomputes
        configure(allow_recompute=False)
        assert strategies.Pipelining([0, 1], recompute=True).recomputes

    @pytest.mark.parametrize(
        ("allowed", "mode", "expected"),
        [
            (None, None, False),
            (None, RecomputationMode.Auto, True),
            (False, RecomputationMode.Auto, False),
            (True, None, True),
            (True, RecomputationMode.Auto, True),
        ],
    )
    def test_pipelines_of_functions_recompute_if_allowed(self, configure, caplog, allowed, mode, expected):
        if allowed is not None:
            configure(allow_recompute=allowed)
        made = pipeline([lambda v, x: x, lambda v, x: x], 4, inputs=[1.0], recomputation_mode=mode)
        assert made.options["pipeline"].recomputes is expected
        assert len(caplog.messages) == (allowed is False)

    def test_an_invalid_recomputation_mode_is_refused_even_without_recomputation(self, configure):
        configure(allow_recompute=False)
        with pytest.raises(TypeError, match="recomputation_mode is 'Auto'; use a member of RecomputationMode"):
            pipeline([lambda v, x: x, lambda v, x: x], 4, inputs=[1.0], recomputation_mode="Auto")

    def test_strategies_are_refused_if_devices_are_never_attached(self, configure):
        configure(device_connection__type=2, device_connection__version="ipu2")
        with pytest.raises(
            strategies.DeviceError, match="is NEVER in the configuration in force, but LocalStrategy would"
        ):
            strategies.IPUStrategy()

    def test_a_folder_of_executables_that_poprun_names_comes_first(self):
        with pytest.raises(ValueError, match="serialization_output_folder is /dev/null/x, but no folder can be made"):
            use_executable_cache({}, "/dev/null/x")
        with pytest.raises(ValueError, match="POPDIST_EXECUTABLE_CACHE_PATH is /dev/null/y"):
            use_executable_cache({"POPDIST_EXECUTABLE_CACHE_PATH": "/dev/null/y"}, "/dev/null/x")

    def test_strategies_keep_executables_in_the_configured_folder(self, configure):
        configure(serialization_output_folder="/dev/null/x")
        with pytest.raises(ValueError, match="serialization_output_folder is /dev/null/x"):
            strategies.IPUStrategy()


def test_the_page_describes_each_attribute_and_its_effect():
    known = [metadata for metadata, _ in IPUConfig().attributes()]
    rows = [
        f"| `{one.name}` | `{getattr(one.default, 'name', repr(one.default))}` | {one.effect or one.description} |"
        for one in sorted(known, key=lambda one: not one.effect)
    ]
    written = re.findall(r"^\| `[\w.]+` \| `.*$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert written == rows
