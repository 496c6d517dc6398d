"""The errors of poprun; each ends the command before an instance is started.

PopRunError           exit status 1
├── UsageError        wrong command line; exit status 2
└── OutputError       standard output or error cannot be written; exit status 141, as after SIGPIPE
"""


class PopRunError(Exception):
    """A fault that the user has to remove; its text is the whole message."""

    exit_status = 1


class UsageError(PopRunError):
    """A command line that asks for something impossible or unknown."""

    exit_status = 2


class OutputError(PopRunError):
    """A failure to write to standard output or standard error."""

    exit_status = 141
