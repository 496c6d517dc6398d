"""The configuration that is in force in this process, and what follows from it for those who leave it open."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass

from strategies.config.category import Category
from strategies.config.selection import Selection

logger = logging.getLogger("strategies.config")


@dataclass(frozen=True)
class Effects:
    """What a configuration changes; by default nothing.

    Attributes:
        selection: the IPUs of a strategy that names no number of replicas.
        process_index: which process this is said to be.
        process_count: how many there are said to be; 0 where nothing is said.
        recomputes: whether pipelines recompute; None where nothing is configured, and their own arguments decide.
        checks_numerics: whether trainers refuse gradients that are not finite.
        rounds_stochastically: whether they round 16-bit variables so.
        min_elements_for_sharding: from how many elements on optimizer state is sharded.
        prefetches: whether data are prepared ahead.
        executables: the folder where compiled programs are kept; "" for none.
        attaches: whether programs run at all.
    """

    selection: Selection | None = None
    process_index: int = 0
    process_count: int = 0
    recomputes: bool | None = None
    checks_numerics: bool = False
    rounds_stochastically: bool = False
    min_elements_for_sharding: int = 32
    prefetches: bool = True
    executables: str = ""
    attaches: bool = True


_NOTHING = Effects()


@dataclass
class _Process:
    """What this process has configured."""

    config: Category | None = None
    effects: Effects = _NOTHING


_process = _Process()
_named: set[str] = set()
"""Attributes without an effect that a line of logging has named already."""


def in_force() -> Effects:
    """What the configuration of this process changes; strategies, trainers and pipelines look when they are made."""
    return _process.effects


def configuration() -> Category:
    """A copy of the configuration that is in force.

    Raises:
        RuntimeError: if there is none.
    """
    if _process.config is None:
        raise RuntimeError("No IPU devices configured; call config.configure_ipu_system() first")
    return copy.deepcopy(_process.config)


def put_in_force(config: Category, effects: Effects, reset_configuration: bool) -> None:
    """Keep a copy of a configuration, and what follows from it, until another one comes.

    Args:
        config: may change afterwards.
        effects: what follows from it.
        reset_configuration: whether it may take the place of a different one.

    Raises:
        RuntimeError: if there is a different one and it may not.
    """
    if _process.config is not None and _process.config != config:
        if not reset_configuration:
            raise RuntimeError(
                "the IPU system is configured already, in another way; call reset_ipu_configuration() first, or leave "
                "reset_configuration at True"
            )
        logger.warning("Resetting existing IPU configuration before applying new configuration")
        reset_ipu_configuration()
    _process.config = copy.deepcopy(config)
    _process.effects = effects
    _name_what_is_only_kept(config)


def reset_ipu_configuration() -> None:
    """Forget the configuration of this process; what was made under it stays as it is."""
    _process.config = None
    _process.effects = _NOTHING


def _name_what_is_only_kept(config: Category) -> None:
    every = config.attributes()
    kept = {metadata.name for metadata, value in every if not metadata.effect and value != metadata.default}
    if new := sorted(kept - _named):
        logger.debug("kept, and without an effect here: %s", ", ".join(new))
        _named.update(new)
