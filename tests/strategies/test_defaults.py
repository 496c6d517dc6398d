"""`Defaults`: a strategy uses the given ones, and the configuration of the process is read in two places."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import optax
import pytest

import strategies
from strategies.compat.ipu_config import select
from strategies.compat.pipelining_ops import pipeline
from strategies.config import IPUConfig, reset_ipu_configuration
from strategies.defaults import in_force

ROOT = Path(__file__).parents[2]


@pytest.fixture
def configured() -> Iterator[None]:
    """Provide a configuration that contradicts the defaults of each strategy below."""
    config = IPUConfig()
    config.auto_select_ipus = 4
    config.floating_point_behaviour.inv = True
    config.optimizations.prefetch_data_streams = False
    config.configure_ipu_system()
    yield
    reset_ipu_configuration()


def reads_of_the_process(path: Path) -> list[str]:
    """Return the file once for each call of `in_force` in it."""
    calls = (node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call))
    return [path.relative_to(ROOT).as_posix() for call in calls if getattr(call.func, "id", "") == "in_force"]


def test_the_configuration_of_the_process_is_read_in_two_places() -> None:
    """The places are a strategy without given defaults, and objects made without a strategy."""
    read = [place for path in sorted((ROOT / "strategies").rglob("*.py")) for place in reads_of_the_process(path)]
    assert read == ["strategies/defaults.py", "strategies/jax/replicas/processes.py"]


@pytest.mark.usefixtures("configured")
class TestGivenDefaults:
    def test_given_defaults_win_over_the_configuration(self) -> None:
        assert strategies.IPUStrategy().num_replicas_in_sync == 4
        own = strategies.IPUStrategy(defaults=strategies.Defaults(select([6], [])))
        assert (own.num_replicas_in_sync, own.for_stages(2).num_replicas_in_sync) == (6, 3)
        assert own.for_stages(2).defaults is own.defaults
        assert strategies.IPUStrategy(defaults=strategies.Defaults()).num_replicas_in_sync == 1

    @pytest.mark.parametrize("checks", [True, False])
    def test_given_defaults_reach_trainers(self, checks: bool) -> None:
        own = strategies.IPUStrategy(2, defaults=strategies.Defaults(checks_numerics=checks))
        trainer = strategies.Trainer(own, lambda variables, batch, key: (variables * batch).sum(), optax.sgd(0.1))
        state, batch = trainer.init(np.float32(1)), np.full((2, 1), np.inf, np.float32)
        if checks:
            with pytest.raises(strategies.NonFiniteGradientError):
                trainer.step(state, batch)
        else:
            trainer.step(state, batch)

    @pytest.mark.parametrize("checks", [True, False])
    def test_given_defaults_reach_trainers_of_pytorch(self, checks: bool) -> None:
        torch = pytest.importorskip("torch")
        own = strategies.IPUStrategy(2, defaults=strategies.Defaults(checks_numerics=checks))
        module = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        trainer = pytest.importorskip("strategies.torch").Trainer(
            own, module, lambda module, rows: module(rows).sum(), optimizer
        )
        batch = torch.full((2, 1), torch.inf)
        if checks:
            with pytest.raises(strategies.NonFiniteGradientError):
                trainer.step(batch)
        else:
            trainer.step(batch)

    def test_given_defaults_reach_objects_made_in_the_scope(self) -> None:
        rows = np.ones((2, 1), np.float32)
        own = strategies.IPUStrategy(2, 2, defaults=strategies.Defaults(recomputes=True))
        with own.scope():
            assert strategies.InfeedQueue(rows).prefetch_depth == 3
            assert strategies.Pipelining([0, 1]).recomputes
            made = pipeline([lambda v, x: x, lambda v, x: x], 4, inputs=[1.0])
        assert made.options["pipeline"].recomputes
        assert strategies.InfeedQueue(rows).prefetch_depth == 1
        assert not strategies.Pipelining([0, 1]).recomputes

    def test_given_defaults_keep_a_process_from_devices(self) -> None:
        with pytest.raises(strategies.DeviceError, match="is NEVER"):
            strategies.IPUStrategy(1, defaults=strategies.Defaults(attaches=False))


def test_a_strategy_without_given_defaults_follows_the_configuration(strategy: strategies.Strategy) -> None:
    """Objects made after a configuration follow it, whenever the strategy was made."""
    assert strategy.defaults == strategies.Defaults() == in_force()
    config = IPUConfig()
    config.floating_point_behaviour.inv = True
    config.configure_ipu_system()
    assert strategy.defaults.checks_numerics
    reset_ipu_configuration()
    assert not strategy.defaults.checks_numerics
