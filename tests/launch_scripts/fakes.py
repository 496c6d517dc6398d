"""Programs that stand for foreign ones."""

from __future__ import annotations

from pathlib import Path


def fake(folder: Path, name: str, body: str) -> None:
    """Put an executable shell script in a folder, in place of what is there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)
