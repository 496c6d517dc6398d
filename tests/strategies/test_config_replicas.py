"""Number of replicas from a configuration: arithmetic, and its relation to launchers."""

from __future__ import annotations

import json

import pytest

import strategies
from popdist import EnvironmentMismatchError, Instance
from popdist.tensorflow import set_ipu_config
from strategies.compat.ipu_config import ipus_of_group, select
from strategies.config import IPUConfig, reset_ipu_configuration
from strategies.defaults import Defaults, Selection, rounded_to_power_of_two
from strategies.job_strategies import check_defaults_match


@pytest.fixture
def config():
    yield IPUConfig()
    reset_ipu_configuration()


class TestArithmetic:
    @pytest.mark.parametrize(
        ("auto", "named", "ipus"), [([4], [], 4), ([2, 4], [], 2), ([], [3], 1), ([], [24, 0], 4), ([], [30], 16)]
    )
    def test_the_first_selected_device_counts(self, auto, named, ipus):
        assert select(auto, named).ipus == ipus

    def test_without_devices_the_number_of_replicas_is_undefined(self):
        assert select([], []) is None

    @pytest.mark.parametrize(
        ("auto", "named", "words"),
        [
            ([0], [], "auto_select_ipus has a device with 0 IPUs; a device needs at least 1"),
            ([2, -1], [], "with -1 IPUs"),
            ([], [1, 1], "All MultiIPU indices in `select_ipus` must be unique"),
            ([], [31], "select_ipus names group 31, but a system of 16 IPUs has the groups 0 to 30"),
            ([], [-1], "select_ipus names group -1"),
        ],
    )
    def test_impossible_devices_are_refused(self, auto, named, words):
        with pytest.raises(ValueError, match=words):
            select(auto, named)

    def test_groups_are_numbered_by_their_size(self):
        sizes = [ipus_of_group(number) for number in range(31)]
        assert sizes == [1] * 16 + [2] * 8 + [4] * 4 + [8] * 2 + [16]

    @pytest.mark.parametrize(("count", "power"), [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8)])
    def test_a_replica_takes_a_power_of_two(self, count, power):
        assert rounded_to_power_of_two(count) == power

    @pytest.mark.parametrize(("ipus", "spanned", "replicas"), [(4, 1, 4), (4, 2, 2), (8, 3, 2), (6, 2, 3), (1, 1, 1)])
    def test_the_number_of_replicas_is_ipus_divided_by_ipus_per_replica(self, ipus, spanned, replicas):
        assert Selection(ipus, "it is so", True).replicas(spanned) == replicas

    @pytest.mark.parametrize(
        ("ipus", "spanned", "needed", "use"), [(2, 3, 4, "4"), (6, 3, 4, "4 or 8"), (1, 2, 2, "2")]
    )
    def test_too_few_and_left_over_ipus_are_refused(self, ipus, spanned, needed, use):
        words = f"Current device has {ipus} IPUs attached, .* requires a multiple of {needed} IPUs .*use {use} IPUs"
        with pytest.raises(ValueError, match=words):
            Selection(ipus, "it is so", True).replicas(spanned)


class TestOneProcess:
    @pytest.mark.parametrize(
        ("ipus", "arguments", "expected"),
        [
            (None, {}, (1, 1)),
            (4, {}, (4, 1)),
            (8, {"ipus_per_replica": 3}, (2, 3)),
            (4, {"num_replicas": 3}, (3, 1)),
            (4, {"num_replicas": 3, "ipus_per_replica": 2}, (3, 2)),
        ],
    )
    def test_a_strategy_has_the_replicas_that_it_names_or_those_that_are_configured(
        self, ipus, arguments, expected, config
    ):
        if ipus is not None:
            config.auto_select_ipus = ipus
            config.configure_ipu_system()
        strategy = strategies.IPUStrategy(**arguments)
        assert (strategy.num_replicas_in_sync, strategy.replicas.grid.ipus_per_replica) == expected

    def test_stages_of_a_model_set_ipus_per_replica_by_default(self, config):
        config.auto_select_ipus = 4
        config.configure_ipu_system()
        strategy = strategies.IPUStrategy()
        staged = strategy.for_stages(2)
        assert (staged.num_replicas_in_sync, staged.replicas.grid.ipus_per_replica) == (2, 2)
        assert strategy.for_stages(1) is strategy
        assert staged.for_stages(2) is staged
        with pytest.raises(ValueError, match="requires a multiple of 8 IPUs"):
            strategy.for_stages(5)

    @pytest.mark.parametrize("named", [{"num_replicas": 4}, {"ipus_per_replica": 2}], ids=str)
    def test_a_strategy_with_given_numbers_ignores_the_stages_of_a_model(self, config, named):
        config.auto_select_ipus = 4
        config.configure_ipu_system()
        strategy = strategies.IPUStrategy(**named)
        assert strategy.for_stages(3) is strategy

    def test_pipelines_without_a_strategy_have_as_many_replicas_as_fit(self, config):
        config.auto_select_ipus = 4
        config.configure_ipu_system()
        made = strategies.pipelining_ops.pipeline([lambda v, x: x, lambda v, x: x], 4, inputs=[1.0])
        assert made.strategy.num_replicas_in_sync == 2

    def test_poprun_decides_and_must_agree(self, config, monkeypatch):
        for name, value in {
            "POPDIST_NUM_TOTAL_REPLICAS": "2",
            "POPDIST_NUM_LOCAL_REPLICAS": "2",
            "POPDIST_NUM_IPUS_PER_REPLICA": "2",
            "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE": "1",
            "POPDIST_REPLICA_INDEX_OFFSET": "0",
            "POPDIST_LOCAL_INSTANCE_INDEX": "0",
        }.items():
            monkeypatch.setenv(name, value)
        set_ipu_config(config, 2).configure_ipu_system()
        strategy = strategies.IPUStrategy()
        assert (strategy.num_replicas_in_sync, strategy.replicas.grid.ipus_per_replica) == (2, 2)
        reset_ipu_configuration()
        config.select_ipus, config.auto_select_ipus = [], 8
        config.configure_ipu_system()
        with pytest.raises(EnvironmentMismatchError, match="auto_select_ipus is 8, but this instance has 2 of 2 repl"):
            strategies.IPUStrategy()


LAUNCHED = Instance(1, 2, 3, 3, 6, 1, ipus_per_replica=3, launcher="poprun")


class TestContradictions:
    @pytest.mark.parametrize(
        "defaults",
        [
            Defaults(),
            Defaults(select([9], [])),
            Defaults(select([12], [])),  # IPUs as a power of two
            Defaults(select([18], [])),  # IPUs of all instances
            Defaults(select([24], [])),
            Defaults(select([], [0])),  # a device name, unrelated to the launcher
            Defaults(process_index=1, process_count=2),
        ],
    )
    def test_a_configuration_of_this_instance_is_accepted(self, defaults):
        check_defaults_match(defaults, LAUNCHED)

    @pytest.mark.parametrize(
        ("defaults", "words"),
        [
            (
                Defaults(select([3], [])),
                "auto_select_ipus is 3, but this instance has 3 of 6 replicas that span 3 .* to 9, or to 18",
            ),
            (Defaults(select([6], [])), "auto_select_ipus is 6"),
            (
                Defaults(process_index=0, process_count=2),
                "process_index 0 of process_count 2, but this is instance 1 of 2",
            ),
            (
                Defaults(process_index=1, process_count=3),
                "process_index 1 of process_count 3, but this is instance 1 of 2",
            ),
        ],
    )
    def test_a_configuration_of_another_instance_is_refused(self, defaults, words):
        with pytest.raises(EnvironmentMismatchError, match=words):
            check_defaults_match(defaults, LAUNCHED)


def test_other_strategies_ignore_the_stages_of_a_model(on_instances):
    assert on_instances(2, 2, lambda strategy: strategy.for_stages(2) is strategy) == [True, True]
    with pytest.raises(ValueError, match="stages is 0; it must be at least 1"):
        on_instances(1, 1, lambda strategy: strategy.for_stages(0))


def test_a_strategy_writes_its_index_and_count_into_the_configuration(config, on_instances):
    def distribution(strategy):
        own = strategy.update_ipu_config(IPUConfig()).experimental.multi_replica_distribution
        return own.process_index, own.process_count

    assert on_instances(3, 3, distribution) == [(0, 3), (1, 3), (2, 3)]


def test_popdist_writes_its_index_and_device_into_the_configuration(config):
    assert set_ipu_config(config) is config
    assert (config.select_ipus, config.experimental.multi_replica_distribution.process_count) == ([0], 1)
    other = set_ipu_config(IPUConfig(), configure_device=False)
    assert other.select_ipus == []
    with pytest.raises(ValueError, match="a device for 2 IPUs per replica was asked for"):
        set_ipu_config(config, 2)


PROGRAM = """
import json, popdist, strategies
config = strategies.config.IPUConfig()
config.auto_select_ipus = 6
{before}
config.configure_ipu_system()
try:
    strategy = strategies.PopDistStrategy(ipus_per_replica=2)
    print(json.dumps([strategy.num_replicas_in_sync, popdist.getNumTotalReplicas()]))
except popdist.EnvironmentMismatchError as error:
    print(json.dumps(str(error)))
"""


def test_without_a_launcher_popdist_is_joined_for_the_configured_replicas(in_new_process):
    assert json.loads(in_new_process(PROGRAM.format(before=""))) == [3, 3]


@pytest.mark.complete
def test_an_earlier_init_for_other_replicas_is_refused(in_new_process):
    said = json.loads(in_new_process(PROGRAM.format(before="popdist.init(2)")))
    assert said.startswith(
        "auto_select_ipus is 6, but this instance has 2 of 2 replicas that span 2 IPUs each (single); set it to 4"
    )
