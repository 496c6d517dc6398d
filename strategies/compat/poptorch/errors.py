"""PopTorch's errors, by the names under which programs catch them.

strategies.StrategyError          `Error`
    RecoverableError              of devices that have to be reset
    UnrecoverableError            of devices that are broken
    SmallDataError                of data that fill no batch; a ValueError, too
ValueError
    ConfigFileError               of options in a file
"""

from strategies.errors import StrategyError


class RecoverableError(StrategyError):
    """Never raised, as there is no IPU that could be reset; programs name it where they catch it."""


class UnrecoverableError(StrategyError):
    """Never raised, as there is no IPU that could break; programs name it where they catch it."""


class ConfigFileError(ValueError):
    """A line of a file is no option."""


class SmallDataError(StrategyError, ValueError):
    """A data set has fewer elements than a batch of all replicas takes."""
