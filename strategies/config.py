"""The original's configuration, under the name by which programs import it."""

from strategies.compat.config import *  # noqa: F403
from strategies.compat.config import __all__ as __all__
