"""Small scripts that replace foreign programs."""

from __future__ import annotations

from pathlib import Path


def fake(folder: Path, name: str, body: str) -> None:
    """Write an executable shell script into a folder, over an existing file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)
