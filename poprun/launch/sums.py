"""XLA's flags for the programs of a job, as far as poprun can know which jaxlib they will find."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from popdist.xla import FLAGS_VARIABLE, is_measured, right_sums_setting
from poprun.cli.settings import Settings
from poprun.launch.exports import exports


def sums_setting(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """What keeps sums right in programs that use JAX without a strategy, which would see to it by itself.

    Nothing where the program is not of poprun's own Python environment, because XLA ends a process at flags that it
    does not know, and where the user exports flags with `-x`.

    Args:
        settings: what the user asked for.
        environ: the user's environment.
    """
    program = shutil.which(settings.program[0], path=environ.get("PATH"))
    is_ours = program is not None and Path(program).parent == Path(sys.executable).parent
    if not is_ours or FLAGS_VARIABLE in exports(settings.all_mpi_args):
        return {}
    version = find_jaxlib([*environ.get("PYTHONPATH", "").split(":"), *sys.path])
    return right_sums_setting(version, environ) if is_measured(version) else {}


def find_jaxlib(folders: list[str]) -> str:
    """The version of the first jaxlib in these folders; "" where there is none. Faster than importing the library."""
    names = (each.name for folder in folders if folder for each in Path(folder).glob("jaxlib-*.dist-info"))
    return next((name.removesuffix(".dist-info").partition("-")[2] for name in names), "")
