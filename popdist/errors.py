"""The errors of popdist, grouped by what the caller does next.

PopDistError
├── EnvironmentMismatchError  the launcher's variables are incomplete or contradict: fix how it is started
├── LifeCycleError            init, register, finalise in an impossible order: fix the program
│   └── NotInitializedError   the Horovod interface was used before its `init` (also a ValueError)
└── InstanceError             an `Instance` was built from impossible numbers (also a ValueError)
"""


class PopDistError(Exception):
    """Base of everything that popdist raises on purpose."""


class EnvironmentMismatchError(PopDistError):
    """The launcher's variables are incomplete or unreadable, or contradict each other or the program."""


class InstanceError(PopDistError, ValueError):
    """An instance cannot be described by these numbers."""


class LifeCycleError(PopDistError, RuntimeError):
    """A call that does not fit what was initialised, registered or finalised so far."""


class NotInitializedError(LifeCycleError, ValueError):
    """The Horovod interface was used before `popdist.horovod.init`."""
