"""The errors of the strategies, grouped by what the caller does next.

StrategyError
├── NonFiniteGradientError  a gradient is NaN or infinite: look at the named variable; the state was not updated
└── DeviceError             more lockstep replicas than devices: make the strategy before JAX starts
"""


class StrategyError(Exception):
    """Base of everything that the strategies raise on purpose, besides TypeError and ValueError."""


class NonFiniteGradientError(StrategyError, ArithmeticError):
    """A gradient is not finite; every instance raises it, and the step is not applied."""


class DeviceError(StrategyError, RuntimeError):
    """The replicas of this instance cannot run in lockstep on the devices that JAX has."""
