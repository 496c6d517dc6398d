"""The libraries that only parts of the project need, and the command that installs them."""

from __future__ import annotations

_LIBRARIES = {
    "grain": ("Grain", "data"),
    "keras": ("Keras", "keras"),
    "orbax": ("Orbax", "checkpoint"),
    "pytorch_lightning": ("PyTorch Lightning", "torch,lightning"),
    "sklearn": ("scikit-learn", "examples"),
    "torch": ("PyTorch", "torch"),
    "tqdm": ("tqdm", "examples"),
}
"""The name of each library, and the extras of setup.cfg that install it, by module."""


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
    hint = " (PyTorch without CUDA: see torch.md)" if module == "torch" else ""
    return (
        f"{user} needs {library}, which is not installed; run pip install -e '.[{extras}]' in a checkout of the "
        f"project{hint}"
    )
