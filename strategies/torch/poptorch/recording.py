"""Recordings in place of PopVision's reports: `Options.enableProfiling`, and `POPLAR_ENGINE_OPTIONS`."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import final

from collectives import Communicator, Settings, connect
from collectives.instruments import Instrument, Instruments
from popdist.instance import Instance
from popdist.timeline.asked import FOLDER_VARIABLE, Asked
from strategies.replicas.membership import Membership, refuse_to_carry_on
from strategies.strategy import Strategy
from strategies.torch.poptorch.errors import ConfigFileError

ENGINE_OPTIONS = "POPLAR_ENGINE_OPTIONS"
_FOLDER, _REPORTS = "autoReport.directory", "autoReport."

_recordings: dict[Path, tuple[Instrument, ...]] = {}

logger = logging.getLogger(__name__)


def folder_wanted(environ: Mapping[str, str], engine_options: Mapping[str, str]) -> Path | None:
    """Return where reports are to be written; None if none are wanted. The environment has precedence.

    Raises:
        ConfigFileError: if the variable is no object of JSON.
    """
    try:
        of_environ = json.loads(environ.get(ENGINE_OPTIONS) or "{}")
    except (ValueError, RecursionError) as error:
        raise ConfigFileError(
            f'{ENGINE_OPTIONS} is no JSON: {error}; write {{"autoReport.directory": "reports"}}, or unset it'
        ) from None
    if not isinstance(of_environ, dict):
        raise ConfigFileError(f'{ENGINE_OPTIONS} is no object of JSON; write {{"autoReport.directory": "reports"}}')
    options = {**engine_options, **of_environ}
    wanted = any(
        name.startswith(_REPORTS) and (name == _FOLDER or str(value).lower() == "true")
        for name, value in options.items()
    )
    return Path(str(options.get(_FOLDER, "."))).absolute() if wanted else None


def record_job(folder: Path) -> None:
    """Have the instances of a job that connect later record into a folder, unless the job is recorded already."""
    if not os.environ.get(FOLDER_VARIABLE):
        os.environ[FOLDER_VARIABLE] = str(folder)
        _tell(folder)


def tell_too_late() -> None:
    """Warn that a job is connected, and not recorded."""
    if not os.environ.get(FOLDER_VARIABLE):
        logger.warning(
            "enableProfiling comes after the instances were connected, and is not heeded; start the program with "
            'poprun --timeline FILE, or with POPLAR_ENGINE_OPTIONS=\'{"autoReport.directory": "FOLDER"}\''
        )


@final
class Recorded(Membership):
    """One process with all replicas, whose steps are recorded.

    Args:
        num_replicas: R.
        folder: where the recording goes.
    """

    def __init__(self, num_replicas: int, folder: Path) -> None:
        self._num_replicas, self._folder = num_replicas, folder
        super().__init__(1)

    def join(self) -> tuple[Instance, Communicator]:
        """See `Membership`."""
        alone = Instance(0, 1, self._num_replicas, 0, self._num_replicas, 0)
        instruments = Instruments(*_instruments_into(self._folder, alone))
        return alone, connect("single", Settings(progress=instruments))

    @property
    def is_chief(self) -> bool:
        """It is."""
        return True

    @property
    def can_carry_on(self) -> bool:
        """There are no others who could."""
        return False

    def join_survivors(self) -> tuple[Instance, Communicator]:
        """See `Membership`."""
        refuse_to_carry_on("replicas of a single process")


@final
class RecordedStrategy(Strategy):
    """Replicas of this process alone, whose steps are recorded.

    Args:
        num_replicas: R.
        folder: where the recording goes.
    """

    def __init__(self, num_replicas: int, folder: Path) -> None:
        super().__init__(Recorded(num_replicas, folder))


def _instruments_into(folder: Path, instance: Instance) -> tuple[Instrument, ...]:
    """Return what records into a folder; of several strategies of a process the first one describes the instance."""
    from popdist.timeline.attaching import Timeline  # loads what only recordings need

    if folder not in _recordings:
        _tell(folder)
        _recordings[folder] = Timeline(Asked(folder), instance, os.environ).instruments
    return _recordings[folder]


def _tell(folder: Path) -> None:
    logger.warning(
        "%s gets a recording of each instance, in place of PopVision's reports; open it with: "
        "poprun timeline report %s --html report.html, or poprun timeline merge %s -o trace.json and "
        "https://ui.perfetto.dev",
        folder,
        folder,
        folder,
    )
