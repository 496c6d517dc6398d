"""Recordings in place of PopVision's reports: `Options.enableProfiling`, and `POPLAR_ENGINE_OPTIONS`."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from collectives.instruments import Instrument
from popdist.instance import Instance
from popdist.timeline.asked import FOLDER_VARIABLE, TimelineOptions
from strategies.torch.poptorch.errors import ConfigFileError

if TYPE_CHECKING:
    from popdist.timeline.attaching import Timeline

ENGINE_OPTIONS = "POPLAR_ENGINE_OPTIONS"
_FOLDER, _REPORTS = "autoReport.directory", "autoReport."

_recordings: dict[Path, Timeline] = {}

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


def recording_into(folder: Path, num_replicas: int) -> tuple[Instrument, ...]:
    """Return what records this process alone; of several strategies the first one describes the instance."""
    from popdist.timeline.attaching import Timeline  # loads what only recordings need

    if folder not in _recordings:
        _tell(folder)
        alone = Instance(0, 1, num_replicas, 0, num_replicas, 0)
        _recordings[folder] = Timeline(TimelineOptions(folder), alone, os.environ)
    return _recordings[folder].instruments


def close_recordings() -> None:
    """Write what is left of the recordings of this process, and end them; at its exit that happens by itself."""
    while _recordings:
        _recordings.popitem()[1].close()


def _tell(folder: Path) -> None:
    logger.warning(
        "%s gets a recording of each instance, in place of PopVision's reports; open it with: "
        "poprun timeline report %s --html report.html, or poprun timeline merge %s -o trace.json and "
        "https://ui.perfetto.dev",
        folder,
        folder,
        folder,
    )
