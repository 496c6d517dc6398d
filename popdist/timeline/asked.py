"""The request for a recording and its options; loads no library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from popdist.errors import EnvironmentMismatchError
from popdist.timeline.profiles import WantedProfile

FOLDER_VARIABLE = "POPDIST_TIMELINE"
"""Folder to which each instance writes its timeline, the same on all instances. `--timeline FILE` sets FILE.parts."""
LIMIT_VARIABLE = "POPDIST_TIMELINE_LIMIT"
"""Largest size of the timeline of one instance, in MB: `--timeline-limit`. Default: 256."""
PROFILE_VARIABLE = "POPDIST_PROFILE"
"""Profiler that records some steps into the timeline, and the steps: `--profile`."""
SUFFIX = ".timeline"
"""Suffix of the files."""
PROFILE_SUFFIX = ".profile"
"""Suffix of the folders of profiles, which lie beside the files."""
USUAL_LIMIT_MB = 256
_BESIDE = ".parts"


def folder_beside(trace: str) -> Path:
    """Return the folder of the recordings that make up `trace`."""
    return Path(f"{trace}{_BESIDE}").absolute()


@dataclass(frozen=True)
class TimelineOptions:
    """The options of a timeline.

    Attributes:
        folder: Folder of the files.
        limit_bytes: Size limit of one file.
        profile: Profile to record as well, or None.
    """

    folder: Path
    limit_bytes: int = USUAL_LIMIT_MB * 10**6
    profile: WantedProfile | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> TimelineOptions | None:
        """Read the options from the environment; return None if no recording is requested.

        Raises:
            EnvironmentMismatchError: The limit is not a positive whole number, or the profile is unknown.
        """
        if not environ.get(FOLDER_VARIABLE):
            _refuse_profile_alone(environ)
            return None
        limit = environ.get(LIMIT_VARIABLE) or str(USUAL_LIMIT_MB)
        if not limit.isdecimal() or not int(limit):
            raise EnvironmentMismatchError(
                f"{LIMIT_VARIABLE}={limit!r} is not a positive whole number of MB; correct or unset it"
            )
        return cls(Path(environ[FOLDER_VARIABLE]).absolute(), int(limit) * 10**6, _profile_in(environ))


def _refuse_profile_alone(environ: Mapping[str, str]) -> None:
    if environ.get(PROFILE_VARIABLE):
        raise EnvironmentMismatchError(
            f"{PROFILE_VARIABLE} is set but {FOLDER_VARIABLE} is not, and a profile is a part of a timeline; set both"
        )


def _profile_in(environ: Mapping[str, str]) -> WantedProfile | None:
    if not environ.get(PROFILE_VARIABLE):
        return None
    try:
        return WantedProfile.parse(environ[PROFILE_VARIABLE])
    except ValueError as error:
        raise EnvironmentMismatchError(f"{PROFILE_VARIABLE}: {error}") from None
