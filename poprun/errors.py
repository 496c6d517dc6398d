"""The errors of poprun; each ends the command before anything is started.

PopRunError           exit status 1
├── UsageError        the command line is wrong; exit status 2
└── OutputError       what was asked for cannot be shown; exit status 141, as after SIGPIPE
"""


class PopRunError(Exception):
    """Something that the user has to change; the text is the whole message."""

    exit_status = 1


class UsageError(PopRunError):
    """The command line asks for something impossible or unknown."""

    exit_status = 2


class OutputError(PopRunError):
    """What poprun has to show cannot be written."""

    exit_status = 141
