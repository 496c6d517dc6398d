"""The errors of popdist, grouped by the caller's next step.

PopDistError
├── EnvironmentMismatchError  the launcher's variables are incomplete or contradictory: start the program correctly
├── LifeCycleError            init, register and finalise came in an impossible order: fix the program
│   └── NotInitializedError   the Horovod interface was used before its `init`: call it first (also a ValueError)
├── LaunchError               a job of `popdist.launch` failed: correct what its message names, and launch again
└── InstanceError             an `Instance` was built from impossible numbers: correct them (also a ValueError)
"""


class PopDistError(Exception):
    """Base class of all errors that popdist raises on purpose."""


class EnvironmentMismatchError(PopDistError):
    """Incomplete, unreadable or contradictory variables of the launcher."""


class InstanceError(PopDistError, ValueError):
    """Numbers that cannot describe an instance."""


class LifeCycleError(PopDistError, RuntimeError):
    """A call that does not fit the state of initialisation, registration or finalisation."""


class NotInitializedError(LifeCycleError, ValueError):
    """A call of the Horovod interface before `popdist.horovod.init`."""


class LaunchError(PopDistError, RuntimeError):
    """A job of `popdist.launch` that could not start, or that ended without a result or an exception of the function.

    Attributes:
        exit_status: The exit status of poprun; None if poprun was not started.
    """

    def __init__(self, message: str, exit_status: int | None = None) -> None:
        super().__init__(message)
        self.exit_status = exit_status
