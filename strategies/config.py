"""The original's configuration (`strategies.compat.config`), under the name that programs import."""

from strategies.compat.config import *  # noqa: F403
from strategies.compat.config import __all__ as __all__
