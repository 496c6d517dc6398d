"""The errors of the strategies, grouped by what the caller does next.

StrategyError
├── UnappliedStepError      no instance has applied the step, and the state is as before: the kind says why
│   ├── NonFiniteGradientError  a gradient or loss is NaN or infinite: look at the named variable
│   ├── WeightError         a weight of a loss is negative or not finite: look at the weights
│   └── ZeroWeightError     all weights of a step are zero: leave the batch out, or skip such steps
├── DivergenceError         instances have different bits: check the named instance's memory, or look for randomness
├── DisagreementError       instances have different arguments or programs: start all of them with the same
├── LostPartError           parts of the state were lost with every copy: start again from the last checkpoint
├── CheckpointError         no checkpoint can be used: the message says which folder and why
├── FeedError               an infeed or outfeed is not in the right state: the message says what to do first
│   └── EndOfDataError      an infeed has no more elements: run fewer steps, or repeat the data
├── FailedPreconditionError a program does not fit the objects it is used with: the message names them
├── SpareError              a spare cannot follow the active instances: the message says why; the others go on
└── DeviceError             too few devices, or wrong sums: make the strategy before JAX starts, or use more devices
"""


class StrategyError(Exception):
    """Base class of the errors that strategies raise, besides TypeError and ValueError."""


class UnappliedStepError(StrategyError):
    """A step that cannot be applied. Every instance raises it, and the state is as before the step."""


class NonFiniteGradientError(UnappliedStepError, ArithmeticError):
    """A gradient, or a mean loss, that is not finite."""


class WeightError(UnappliedStepError, ValueError):
    """A weight of a loss that is negative or not finite, or a mean weight that float32 cannot hold."""


class ZeroWeightError(WeightError, ArithmeticError):
    """Weights of losses that are all zero, so that they have no mean. It is a `WeightError`."""


class DivergenceError(StrategyError, RuntimeError):
    """Different bits on instances, in arrays that must be equal. Every instance raises it."""


class DisagreementError(StrategyError, RuntimeError):
    """Different options, data or programs on instances. Every instance raises it, before the first step."""


class LostPartError(StrategyError, RuntimeError):
    """Parts of the state that no remaining instance has. Every remaining instance raises it."""


class CheckpointError(StrategyError, RuntimeError):
    """A checkpoint that cannot be written or read, or does not fit this training."""


class SpareError(StrategyError, RuntimeError):
    """A part of the program that a spare cannot replay, or values that it does not have. The job goes on without it."""


class DeviceError(StrategyError, RuntimeError):
    """Raised if a device computes wrong sums, or if there are too few devices for replicas that use collectives."""


class FailedPreconditionError(StrategyError, RuntimeError):
    """A program that would run with other numbers than its caller assumes. The original has an error of this name."""


class FeedError(StrategyError, RuntimeError):
    """An infeed or outfeed whose present state does not allow the call."""


class EndOfDataError(FeedError):
    """A request for more elements than the data set of an infeed has."""
