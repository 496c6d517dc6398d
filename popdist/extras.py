"""The libraries that only parts of the project need, and the commands that install them."""

from __future__ import annotations

from pathlib import Path

_LIBRARIES = {
    "cloudpickle": ("cloudpickle", "notebook"),
    "grain": ("Grain", "data"),
    "keras": ("Keras", "keras"),
    "orbax": ("Orbax", "checkpoint"),
    "pytorch_lightning": ("PyTorch Lightning", "torch,lightning"),
    "sklearn": ("scikit-learn", "examples"),
    "torch": ("PyTorch", "torch"),
    "tqdm": ("tqdm", "examples"),
}
"""The name of each library, and the extras of setup.cfg that install it, by module."""


def install_command(extras: str, root: Path = Path(__file__).parents[1]) -> str:
    """Return the command that installs extras: into a checkout without replacing it, otherwise from an index.

    Args:
        extras: Names of extras with commas between them.
        root: The folder of our packages.
    """
    if (root / "setup.cfg").is_file():
        return f"pip install -e '.[{extras}]' in the project's folder"
    return f"pip install 'popdist-everywhere[{extras}]'"


def describe_missing(error: ImportError, user: str) -> str:
    """Describe in one sentence a library that is missing, and how to install it; "" for other errors of an import.

    Args:
        error: The error of an import.
        user: What needs the library.
    """
    module = (error.name or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or module not in _LIBRARIES:
        return ""
    library, extras = _LIBRARIES[module]
    hint = " (without CUDA: see torch.md)" if module == "torch" else ""
    return f"{user} needs {library}, which is not installed; run {install_command(extras)}{hint}"
