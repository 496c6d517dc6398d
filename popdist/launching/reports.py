"""The reports of instances at the end of a launched function, and the outcome of the job that follows from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from popdist.errors import LaunchError
from popdist.launching.channel import LaunchMessage, MessageKind, Part
from popdist.launching.travelling import unpack

MOST_NOTES = 8
"""The most failures of other instances that an exception names."""


@dataclass(frozen=True)
class ReportSender:
    """An instance at the end of the function.

    Attributes:
        index: Its index.
        count: The number of instances.
        host: Its host.
        attempt: The number of restarts of the job so far.
        may_lose: Whether the job goes on without lost instances.
    """

    index: int
    count: int
    host: str
    attempt: int = 0
    may_lose: bool = False

    def __str__(self) -> str:
        return f"instance {self.index} on {self.host}"


@dataclass(frozen=True)
class InstanceResult:
    """The result of the function on one instance; `parts` is the pickle with its buffers."""

    sender: ReportSender
    parts: Sequence[Part] = field(repr=False)

    def pack(self) -> LaunchMessage:
        """Return the message for the launching process."""
        return LaunchMessage(MessageKind.RESULT, [json.dumps(asdict(self.sender)).encode(), *self.parts])


@dataclass(frozen=True)
class InstanceFailure:
    """An exception of the function on one instance.

    Attributes:
        sender: The instance.
        said: The exception's type and message.
        trace: The traceback, as Python prints it.
        follows: Whether the exception follows from the end of another instance.
        parts: The pickled exception with its buffers; empty if it cannot be pickled, or is no `Exception`.
    """

    sender: ReportSender
    said: str
    trace: str
    follows: bool = False
    parts: Sequence[Part] = field(default=(), repr=False)

    def pack(self) -> LaunchMessage:
        """Return the message for the launching process."""
        described = {"sender": asdict(self.sender), "said": self.said, "trace": self.trace, "follows": self.follows}
        return LaunchMessage(MessageKind.FAILURE, [json.dumps(described).encode(), *self.parts])

    def as_exception(self, exit_status: int) -> Exception:
        """Return the exception, with the traceback of the instance as its cause, after poprun has ended."""
        from multiprocessing.pool import RemoteTraceback  # type: ignore[attr-defined]  # its stub lacks the class

        error = self._unpacked(exit_status)
        error.__cause__ = RemoteTraceback(f"\n{self.sender}:\n{self.trace}")
        error.add_note(f"raised by {self.sender}")
        return error

    def _unpacked(self, exit_status: int) -> Exception:
        try:
            error = unpack(self.parts)
        except Exception:  # of any kind, because the exception's class may do anything
            error = None
        return error if isinstance(error, Exception) else LaunchError(self.said, exit_status)


InstanceReport = InstanceResult | InstanceFailure


def read_report(message: LaunchMessage) -> InstanceReport:
    """Return the report in a message.

    Raises:
        ValueError: The message contains none.
    """
    described = json.loads(bytes(message.parts[0]))
    rest = message.parts[1:]
    if message.kind is MessageKind.RESULT:
        return InstanceResult(ReportSender(**described), rest)
    if message.kind is MessageKind.FAILURE:
        return InstanceFailure(**{**described, "sender": ReportSender(**described["sender"])}, parts=rest)
    raise ValueError(f"{message.kind} is no report")


def results_of(reports: Sequence[InstanceReport], exit_status: int) -> list[object]:
    """Return the results of all instances in order, after poprun has ended with status 0.

    Raises:
        LaunchError: A result is missing in a job that needs all instances, or it cannot be unpickled here.
    """
    last = max((report.sender.attempt for report in reports), default=0)
    results = [each for each in reports if isinstance(each, InstanceResult) and each.sender.attempt == last]
    # Instances that are left when others have returned are numbered anew, from 0.
    by_place = {(-each.sender.count, each.sender.index): each for each in results}
    count = results[-1].sender.count if results else 1
    missing = sorted(set(range(count)) - {index for _, index in by_place})
    if missing and not (results and results[-1].sender.may_lose):
        raise LaunchError(
            f"poprun has ended with status {exit_status}, but no result has come from instance {missing[0]}; let the "
            "function return on every instance, do not call os._exit, and leave out options that start no job, such as "
            "--dry-run",
            exit_status,
        )
    return [_value_of(each, exit_status) for _, each in sorted(by_place.items(), key=lambda item: item[0])]


def _value_of(result: InstanceResult, exit_status: int) -> object:
    try:
        return unpack(result.parts)
    except Exception as error:
        raise LaunchError(
            f"the result of {result.sender} cannot be unpickled in this process: {error}; return NumPy "
            "arrays, numbers and texts",
            exit_status,
        ) from error


def cause_of(reports: Sequence[InstanceReport], exit_status: int) -> Exception | None:
    """Return the exception to raise after a failure: the first of the last attempt that has one of its own.

    Its notes name the failures of the other instances. None: no instance has reported an exception, except exceptions
    that follow from another instance's end, which poprun explains.
    """
    failures = [report for report in reports if isinstance(report, InstanceFailure)]
    causes = [failure for failure in failures if not failure.follows]
    if not causes:
        return None
    cause = max(causes, key=lambda failure: failure.sender.attempt)
    error = cause.as_exception(exit_status)
    others = [failure for failure in failures if failure is not cause]
    for failure in others[:MOST_NOTES]:
        error.add_note(f"{failure.sender} also failed: {failure.said}")
    if len(others) > MOST_NOTES:
        error.add_note(f"{len(others) - MOST_NOTES} more instances failed")
    return error
