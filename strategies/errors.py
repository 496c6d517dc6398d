"""The errors of the strategies, grouped by what the caller does next.

StrategyError
├── NonFiniteGradientError  a gradient is NaN or infinite: look at the named variable; the state was not updated
├── DivergenceError         instances have different bits: look at the named instance's memory, or for what is random
├── DisagreementError       instances were started with different arguments or programs: start all with the same
├── CheckpointError         no checkpoint can be used: the message says which folder and why
├── FeedError               an infeed or outfeed is not in a state for this: the message says what to do first
│   └── EndOfDataError      a program asks an infeed for more than its data set has: run fewer steps, or repeat the data
├── FailedPreconditionError a program is right by itself and not with what it is used with: the message says with what
└── DeviceError             the devices will not do, too few for lockstep or with wrong sums: make the strategy before
                            JAX starts
"""


class StrategyError(Exception):
    """Base of everything that the strategies raise on purpose, besides TypeError and ValueError."""


class NonFiniteGradientError(StrategyError, ArithmeticError):
    """A gradient is not finite; every instance raises it, and the step is not applied."""


class DivergenceError(StrategyError, RuntimeError):
    """Instances have different bits in what has to be the same; every instance raises it."""


class DisagreementError(StrategyError, RuntimeError):
    """Instances differ in what decides the result; every instance raises it, before the first step."""


class CheckpointError(StrategyError, RuntimeError):
    """A checkpoint cannot be written, read, or continued by this training."""


class DeviceError(StrategyError, RuntimeError):
    """The replicas of this instance cannot run on the devices that JAX has, in lockstep or with right sums."""


class FailedPreconditionError(StrategyError, RuntimeError):
    """A program would run with other numbers than those with which it is used. The original's error of that name."""


class FeedError(StrategyError, RuntimeError):
    """An infeed or outfeed cannot do this in the state in which it is."""


class EndOfDataError(FeedError):
    """A program has asked an infeed for more elements than its data set has."""
