"""`strategies.torch` without PyTorch: the error tells how to install it."""

import sys

import pytest


def test_the_error_without_pytorch_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.startswith("strategies.torch")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ModuleNotFoundError, match=r"run pip install -e '\.\[torch\]' in a checkout"):
        __import__("strategies.torch")
