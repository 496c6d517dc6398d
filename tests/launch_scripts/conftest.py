"""The programs in launch_scripts import their neighbours as a started script does."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "launch_scripts"))

import strategies  # noqa: E402

strategies.IPUStrategy(8)  # JAX's devices and how it adds are fixed when it starts
