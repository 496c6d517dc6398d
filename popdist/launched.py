"""The program of an instance of a launched function: it gets the function, runs it, and reports its result."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, cast

from popdist.context import instance
from popdist.environments.poprun import LAUNCH_VARIABLES, SHRINKS_VARIABLE, SPARE_VARIABLE
from popdist.failing import follows_from_another
from popdist.instance import this_host
from popdist.launching.channel import FUNCTION_LIMIT_S, LaunchChannel, LaunchMessage, MessageKind, call
from popdist.launching.reports import InstanceFailure, InstanceResult, ReportSender
from popdist.launching.travelling import know_sources, pack, unpack
from popdist.membership.process import member, process
from popdist.records.faults import ATTEMPT_VARIABLE
from popdist.records.progress import Role

_OF_SIGNALS = 128


def main() -> None:
    """Run the function of the launching process; end with status 1 if it raises an exception."""
    channel = call(os.environ)
    for name in LAUNCH_VARIABLES:
        os.environ.pop(name, None)  # the function's own child processes are no instances
    channel.send(LaunchMessage(MessageKind.READY))
    channel.limit(FUNCTION_LIMIT_S)
    setup, *parts = channel.receive().parts
    channel.limit(None)
    described = json.loads(bytes(setup))
    # In the same order, so that a name is the same module here as in the launching process.
    sys.path[:] = dict.fromkeys([*described["path"], *sys.path])
    sys.argv = described["argv"]
    know_sources(described["sources"])
    own = os.getpid()
    try:
        function, args = cast("tuple[Callable[..., object], tuple[object, ...]]", unpack(parts))
        del parts
        value = function(*args)
    except SystemExit as error:
        if error.code not in (None, 0):
            follows_from_signal = isinstance(error.code, int) and error.code >= _OF_SIGNALS  # poprun explains it
            if os.getpid() == own and not follows_from_signal:
                _report(channel, error)
            raise
        value = None
    except BaseException as error:
        if os.getpid() != own:
            raise
        _fail(channel, error)
    if os.getpid() == own and not _is_spare():  # a child process that the function has forked may return from it
        _send_result(channel, value)


def _is_spare() -> bool:
    """Return whether this process has taken no instance's place; an instance reports its result for it."""
    return member.role is Role.SPARE if process.communicator is not None else SPARE_VARIABLE in os.environ


def _send_result(channel: LaunchChannel, value: object) -> None:
    try:
        parts = pack(value)
    except Exception as error:
        refusal = TypeError(
            f"the result of the function, a {type(value).__name__}, cannot be pickled: {error}; return NumPy arrays, "
            "numbers and texts"
        )
        _fail(channel, refusal)
    channel.send(InstanceResult(_sender(), parts).pack())


def _fail(channel: LaunchChannel, error: BaseException) -> NoReturn:
    """Report an exception, which the launching process raises again, and end this process."""
    _report(channel, error)
    sys.exit(1)


def _report(channel: LaunchChannel, error: BaseException) -> None:
    """Report an exception. One that is no `Exception`, such as a KeyboardInterrupt, is not raised again, but named."""
    own = error.__traceback__
    trace = "".join(traceback.format_exception(type(error), error, own and own.tb_next))
    said, parts, follows = "".join(traceback.format_exception_only(error)).strip(), [], False
    if isinstance(error, Exception):
        follows = follows_from_another(error)
        with suppress(Exception):  # of any kind, because the exception's class may do anything
            parts = pack(error)
    else:
        said = f"the function has ended with {said}"
    channel.send(InstanceFailure(_sender(), said, trace, follows, parts).pack())


def _sender() -> ReportSender:
    this = instance()
    attempt = int(os.environ.get(ATTEMPT_VARIABLE, "0"))
    return ReportSender(this.index, this.count, this_host(), attempt, SHRINKS_VARIABLE in os.environ)
