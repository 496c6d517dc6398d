"""Rooms whose library is missing: the error tells how to install it."""

import sys

import pytest


@pytest.mark.parametrize(
    ("room", "module", "text"),
    [
        ("strategies.torch", "torch", "strategies.torch needs PyTorch"),
        ("strategies.keras", "keras", "strategies.keras needs Keras"),
    ],
)
def test_the_error_without_a_library_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, room: str, module: str, text: str
) -> None:
    for name in [each for each in sys.modules if each.startswith(room)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError) as caught:
        __import__(room)
    assert str(caught.value).startswith(f"{text}, which is not installed; run pip install -e '.[{module}]' in a ")
    assert caught.value.name == module
