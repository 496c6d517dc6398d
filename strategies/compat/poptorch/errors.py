"""PopTorch's errors, by the names with which programs catch them.

strategies.StrategyError          `Error`
    RecoverableError              a device must be reset
    UnrecoverableError            a device is broken
    SmallDataError                data do not fill a batch; also a ValueError
ValueError
    ConfigFileError               a line of an options file is invalid
"""

from strategies.errors import StrategyError


class RecoverableError(StrategyError):
    """A device must be reset. Never raised, because there is no IPU; programs may catch it by name."""


class UnrecoverableError(StrategyError):
    """A device is broken. Never raised, because there is no IPU; programs may catch it by name."""


class ConfigFileError(ValueError):
    """A line of an options file is not an option."""


class SmallDataError(StrategyError, ValueError):
    """A data set has fewer elements than a batch of all replicas needs."""
