"""The programs in docs/torch.md run, and the page names what there is."""

from __future__ import annotations

import re
from pathlib import Path

import strategies.torch

PAGE = (Path(__file__).parents[3] / "docs" / "torch.md").read_text(encoding="utf-8")


def test_its_programs_run_one_after_another(capsys):
    names: dict[str, object] = {"__name__": "__main__"}
    for program in re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL):
        exec(compile(program, "docs/torch.md", "exec"), names)
    assert capsys.readouterr().out.splitlines()[0] == "24"


def test_public_names_are_sorted_described_and_mentioned():
    exported = strategies.torch.__all__
    assert list(exported) == sorted(exported)
    for name in exported:
        assert getattr(strategies.torch, name).__doc__
        assert re.search(rf"\b{name}\b", PAGE), name


def test_what_it_mentions_of_trainers_exists():
    mentioned = set(re.findall(r"\btrainer\.([a-z]\w*)", PAGE))
    assert mentioned
    assert all(hasattr(strategies.torch.Trainer, name) for name in mentioned)
