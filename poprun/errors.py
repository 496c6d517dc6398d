"""The errors of poprun; each ends the command before anything is started.

PopRunError           exit status 1
└── UsageError        the command line is wrong; exit status 2
"""


class PopRunError(Exception):
    """Something that the user has to change; the text is the whole message."""

    exit_status = 1


class UsageError(PopRunError):
    """The command line asks for something impossible or unknown."""

    exit_status = 2
