"""A mark for tests of Horovod; they are skipped if it is not installed, or fail if it is required."""

from __future__ import annotations

import importlib.util
import os

import pytest

IS_INSTALLED = importlib.util.find_spec("horovod") is not None
IS_REQUIRED = bool(os.environ.get("POPDIST_REQUIRE_HOROVOD"))

needs_horovod = pytest.mark.skipif(
    not IS_INSTALLED and not IS_REQUIRED,
    reason="Horovod is not installed; build it with: sh launch_scripts/install_horovod.sh",
)
