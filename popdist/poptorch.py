"""The original's `popdist.poptorch`: options of PopTorch's interface for an instance under poprun.

The interface itself is `strategies.torch.poptorch`, imported on demand: this package depends on no framework.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def Options(ipus_per_replica: int | None = None) -> Any:
    """Return `strategies.torch.poptorch.PopdistOptions` for the replicas of this instance and all instances of the job.

    Args:
        ipus_per_replica: Number of devices of a replica; default: the number of the launcher.
    """
    return import_module("strategies.torch.poptorch").PopdistOptions(ipus_per_replica)
