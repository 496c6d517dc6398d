"""The original's `popdist.poptorch`: options of PopTorch's interface for an instance under poprun.

The interface is `strategies.torch.poptorch`, which is loaded by its name when it is asked for: this package knows no
framework.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def Options(ipus_per_replica: int | None = None) -> Any:
    """`strategies.torch.poptorch.PopdistOptions`: the replicas of this instance, and all instances of the job.

    Args:
        ipus_per_replica: see there.
    """
    return import_module("strategies.torch.poptorch").PopdistOptions(ipus_per_replica)
