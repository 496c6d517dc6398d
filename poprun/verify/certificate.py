"""Certificates of verified runs, for a repetition later or elsewhere."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from poprun.cli.command_line import CommandLine
from poprun.cli.config import open_own, read_trusted
from poprun.errors import PopRunError, UsageError
from poprun.launch.program import quote_words
from poprun.verify.explanation import differing_facts
from poprun.verify.options import VerifyRequest
from poprun.verify.records import (
    BATCH,
    FINGERPRINT,
    GRADIENTS,
    METRICS,
    PARTS,
    START,
    UPDATE,
    JsonObject,
    Record,
    RecordedProcess,
    RecordedStep,
)

FORMAT = 1
SHORT_DIGITS = 8
_SEAL = "sha256"


@dataclass(frozen=True)
class Certificate:
    """The runs that were verified, and their digests.

    Attributes:
        program: The words of the program, with its arguments.
        options: The options of poprun for every run.
        replicas: R.
        steps: The number of steps after which each run ended; None if the program decided.
        spreads: The numbers of instances.
        transports: The connections between instances.
        runs: Descriptions of the runs.
        record: The record of the first run, with short digests. It has the facts that decide the bits.
        is_as_written: Whether the file is unchanged since it was written.
    """

    program: tuple[str, ...]
    options: JsonObject
    replicas: int
    steps: int | None
    spreads: tuple[int, ...]
    transports: tuple[str, ...]
    runs: tuple[str, ...]
    record: Record
    is_as_written: bool = True

    def as_json(self) -> str:
        """Return the certificate as the text of its file."""
        content = {
            "format": FORMAT,
            "program": self.program,
            "options": self.options,
            "replicas": self.replicas,
            "steps": self.steps,
            "spreads": self.spreads,
            "transports": self.transports,
            "runs": self.runs,
            "facts": [dict(process.facts) for process in self.record.processes[:1]],
            "names": _names(self.record),
            "record": [_as_json(place, step) for place, step in self.record.steps.items()],
        }
        return json.dumps({**content, _SEAL: _seal(content)}, indent=1)


def certificate_of(asked: VerifyRequest, spreads: Sequence[int], runs: Sequence[str], record: Record) -> Certificate:
    """Return the certificate of runs that are all equal to the first one."""
    return Certificate(
        program=asked.line.program,
        options={name: value for name, value in asked.line.values.items() if name != "num-replicas"},
        replicas=asked.replicas,
        steps=asked.steps,
        spreads=tuple(spreads),
        transports=asked.transports,
        runs=tuple(runs),
        record=shortened(record),
    )


def read_certificate(path: Path) -> Certificate:
    """Read a certificate from its file.

    Raises:
        UsageError: If the file cannot be read or is no certificate, or if another user may change the program in it.
    """
    try:
        content = json.loads(read_trusted(path, "certificate"))
    except OSError as error:
        raise UsageError(f"certificate {path} cannot be read: {error.strerror}; check --against") from None
    except (ValueError, RecursionError):  # ValueError also for thousands of digits, RecursionError for brackets
        raise UsageError(f"certificate {path} is not JSON; write one with poprun verify --certificate") from None
    try:
        return _from_json(content)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UsageError(
            f"certificate {path} is not of format {FORMAT} ({error!r:.200}); write one with poprun verify --certificate"
        ) from None


def check_writable(path: Path) -> None:
    """Test before the first run whether a certificate could be written.

    Raises:
        UsageError: If it could not.
    """
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise UsageError(f"certificate {path} cannot be written; check --certificate")


def write_certificate(path: Path, certificate: Certificate) -> None:
    """Write the file of a certificate, whole or not at all.

    Raises:
        PopRunError: If the file cannot be written.
    """
    written = path.with_name(f"{path.name}.incomplete")
    try:
        written.unlink(missing_ok=True)
        with open(open_own(written, os.O_EXCL), "w", encoding="utf-8") as file:
            file.write(certificate.as_json() + "\n")
        written.replace(path)
    except OSError as error:
        written.unlink(missing_ok=True)
        raise PopRunError(f"certificate {path} cannot be written: {error.strerror}; write it elsewhere") from None


def asked_again(asked: VerifyRequest, certificate: Certificate) -> VerifyRequest:
    """Return the user's request, completed from the certificate.

    Raises:
        UsageError: If the user asks for another number of replicas.
    """
    given = asked.line.values.get("num-replicas", certificate.replicas)
    if given != certificate.replicas:
        raise UsageError(
            f"--num-replicas is {given}, but the certificate has {certificate.replicas} replicas, and another number "
            "gives other bits; leave it out"
        )
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in certificate.options.items()}
    values = {**options, **asked.line.values, "num-replicas": certificate.replicas}
    return replace(
        asked,
        line=CommandLine(values, asked.line.program or certificate.program),
        spreads=asked.spreads or certificate.spreads,
        transports=certificate.transports if asked.transports == VerifyRequest.transports else asked.transports,
        steps=certificate.steps if asked.steps is None else asked.steps,
    )


def describe_options_of(certificate: Certificate, asked: VerifyRequest) -> str:
    """Return the words of a command that come from the certificate instead of the user."""
    words: list[str] = []
    for name, value in certificate.options.items():
        if name not in asked.line.values:
            values = value if isinstance(value, list) else [value]
            words += [f"--{name}={str(each).lower() if isinstance(each, bool) else each}" for each in values]
    return quote_words([*words, *(() if asked.line.program else certificate.program)])


def changed_facts(certificate: Certificate, record: Record) -> list[tuple[str, str, str]]:
    """Return the facts that decide bits and have changed, as (name, value then, value now)."""
    now, then = record.processes[:1], certificate.record.processes[:1]
    found = [(name, values[0], values[1]) for name, values in differing_facts([*then, *now])]
    missing = (
        [
            (name, then[0].facts.get(name, "unset"), now[0].facts.get(name, "unset"))
            for name in {**then[0].facts, **now[0].facts}
            if (name in then[0].facts) != (name in now[0].facts)
        ]
        if then and now
        else []
    )
    return [*found, *missing]


def shortened(record: Record) -> Record:
    """Return the record with the short digests of certificates."""
    steps = {}
    for place, step in record.steps.items():
        short = steps[place] = RecordedStep()
        for part in PARTS:
            for name, digests in step.parts.get(part, {}).items():
                for digest, instances in digests.items():
                    short.add(
                        part, name, digest if part in (METRICS, FINGERPRINT) else digest[:SHORT_DIGITS], instances
                    )
    return Record(record.processes, steps, record.questions, record.checkpoints)


def _names(record: Record) -> list[dict[str, list[str]]]:
    """Return the names of all digests for each training, from its first step."""
    trainings: dict[int, RecordedStep] = {}
    for (training, _), step in record.steps.items():
        trainings.setdefault(training, step)
    return [{part: list(step.parts.get(part, {})) for part in PARTS} for step in trainings.values()]


def _as_json(place: tuple[int, int], step: RecordedStep) -> JsonObject:
    digests = {
        part: [next(iter(found)) for found in step.parts.get(part, {}).values()]
        for part in (BATCH, GRADIENTS, METRICS, UPDATE)
    }
    first = {START: [next(iter(found)) for found in step.parts.get(START, {}).values()]} if place[1] == 0 else {}
    return {"training": place[0], "step": place[1], FINGERPRINT: step.fingerprint, **first, **digests}


def _from_json(content: JsonObject) -> Certificate:
    if content["format"] != FORMAT:
        raise ValueError(f"format {content['format']}")
    steps: dict[tuple[int, int], RecordedStep] = {}
    for each in content["record"]:
        step = steps[int(each["training"]), int(each["step"])] = RecordedStep()
        for part in PARTS:
            names = content["names"][each["training"]][part]
            digests = [each[FINGERPRINT]] if part == FINGERPRINT else each.get(part, ())
            for name, digest in zip(names, digests, strict=False):
                step.add(part, name, str(digest), (0,))
    rest = {name: value for name, value in content.items() if name != _SEAL}
    facts = content["facts"]
    process = [
        RecordedProcess(0, 1, content["replicas"], "", "", {str(name): str(facts[0][name]) for name in facts[0]})
    ]
    return Certificate(
        program=tuple(map(str, content["program"])),
        options=dict(content["options"]),
        replicas=int(content["replicas"]),
        steps=None if content["steps"] is None else int(content["steps"]),
        spreads=tuple(map(int, content["spreads"])),
        transports=tuple(map(str, content["transports"])),
        runs=tuple(map(str, content["runs"])),
        record=Record(tuple(process), steps),
        is_as_written=content.get(_SEAL) == _seal(rest),
    )


def _seal(content: JsonObject) -> str:
    """Return a digest of the content, which detects accidental changes; it is not a signature."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
