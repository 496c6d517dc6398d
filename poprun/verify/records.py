"""The records of all instances of a run, merged into one."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from popdist.records import recording
from popdist.records.recording import Question
from poprun.errors import PopRunError

JsonObject = Mapping[str, Any]
"""A line of a record, or a part of a certificate, as values of JSON."""

START, BATCH, GRADIENTS, METRICS, UPDATE, FINGERPRINT = (
    "start",
    "batch",
    "gradients",
    "metrics",
    "variables",
    "fingerprint",
)
PARTS = (START, BATCH, GRADIENTS, METRICS, UPDATE, FINGERPRINT)
"""The parts of a step's record, in the order of their computation."""

StepPlace = tuple[int, int]
"""The number of a training in the program, and the number of a step in it."""

Digests = dict[str, dict[str, tuple[int, ...]]]
"""The instances with each digest, by name and digest."""


@dataclass(frozen=True)
class RecordedProcess:
    """An instance that has recorded something.

    Attributes:
        instance: The index of the instance.
        instances: The number of instances.
        replicas: The number of replicas of all instances.
        strategy: The class name of its strategy.
        host: Its host.
        facts: The facts that decide its bits besides the program, by name.
    """

    instance: int
    instances: int
    replicas: int
    strategy: str
    host: str
    facts: Mapping[str, str]

    @classmethod
    def of(cls, line: JsonObject) -> RecordedProcess:
        """Return the instance that a line of kind PROCESS describes."""
        cpu = line["cpu"]
        facts = {
            **line["versions"],
            "CPU": cpu["model"],
            "CPU vectors": cpu["vectors"],
            "CPU features": cpu["features_crc32"],
            "device": line["device"],
            **line["settings"],
            "program's SHA-256": line["program_sha256"] or "",
        }
        own = {name: line[name] for name in ("instance", "instances", "replicas", "strategy", "host")}
        return cls(**own, facts=facts)


@dataclass
class RecordedStep:
    """The merged record of a step of all instances.

    Attributes:
        parts: The digests of each part.
        random: For each global random generator of the host that was used, the digests of its state.
        carried: The replicas that each instance has driven, by its index.
    """

    parts: dict[str, Digests] = field(default_factory=dict)
    random: dict[str, set[str]] = field(default_factory=dict)
    carried: dict[int, range] = field(default_factory=dict)

    def add(self, part: str, name: str, digest: str, instances: Iterable[int]) -> None:
        """Store a digest of some instances."""
        found = self.parts.setdefault(part, {}).setdefault(name, {})
        found[digest] = tuple(sorted({*found.get(digest, ()), *instances}))

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the variables after the step, as `strategies.fingerprint` computes it."""
        return next(iter(self.parts.get(FINGERPRINT, {}).get("", {"": ()})))


@dataclass(frozen=True)
class Values:
    """The file with the values of one part of a step, as an instance has written it.

    Attributes:
        path: The file.
        places: For each name, its dtype, its offset and its number of bytes.
    """

    path: Path
    places: Mapping[str, tuple[str, int, int]]

    def read(self, name: str) -> tuple[str, bytes]:
        """Return the dtype and the bytes of an array."""
        dtype, offset, size = self.places[name]
        with self.path.open("rb") as file:
            file.seek(offset)
            return dtype, file.read(size)


@dataclass(frozen=True)
class Record:
    """The record of a run.

    Attributes:
        processes: The instances of the run.
        steps: The steps in their order.
        questions: The places where the program has asked for the instance's index, or for the number of instances.
        checkpoints: The directories of its checkpoints.
        obstacles: The reasons why the program ends if an instance is lost.
        obstacles_to_joins: The reasons why no spare can take the place of a lost instance.
        values: The stored values, by part and instance.
        recording_s: The longest time that an instance spent on recording.
    """

    processes: tuple[RecordedProcess, ...] = ()
    steps: Mapping[StepPlace, RecordedStep] = field(default_factory=dict)
    questions: tuple[Question, ...] = ()
    checkpoints: tuple[str, ...] = ()
    obstacles: tuple[str, ...] = ()
    obstacles_to_joins: tuple[str, ...] = ()
    values: Mapping[tuple[str, int], Values] = field(default_factory=dict)
    recording_s: float = 0.0

    @property
    def last_fingerprint(self) -> str:
        """The fingerprint after the last step; "" without steps."""
        return list(self.steps.values())[-1].fingerprint if self.steps else ""

    def steps_until(self, place: StepPlace) -> int:
        """Return the number of steps up to and including `place`; all steps if the run has not made that one."""
        places = list(self.steps)
        return places.index(place) + 1 if place in self.steps else len(places)


def name_place(place: StepPlace, has_trainings: bool, noun: str = "step ") -> str:
    """Return the name of a step; steps and trainings are counted from 0."""
    training, step = place
    return f"{noun}{step} of training {training}" if has_trainings else f"{noun}{step}"


def read_record(folder: Path, but: Collection[Path] = ()) -> Record:
    """Read and merge the records in a folder, except for the files in `but`.

    Raises:
        PopRunError: If a file cannot be read, or is damaged.
    """
    lines: list[tuple[int, JsonObject]] = []
    for path in record_files(folder):
        if path not in but:
            own = _lines_of(path)
            first_index = next((line["instance"] for line in own if line["kind"] == recording.PROCESS), 0)
            lines += [(first_index, line) for line in own]
    return record_of(sorted(lines, key=lambda each: each[0]), folder)


def record_files(folder: Path) -> list[Path]:
    """Return the file of each process, sorted by the end of the processes."""
    return sorted(folder.glob(f"*{recording.SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)


def record_of(lines: Iterable[tuple[int, JsonObject]], folder: Path) -> Record:
    """Merge the lines of records; each one comes with the index of its instance."""
    processes: dict[int, RecordedProcess] = {}
    questions: dict[Question, None] = {}
    checkpoints: dict[str, None] = {}
    obstacles: dict[str, dict[str, None]] = {recording.OBSTACLE: {}, recording.OBSTACLE_TO_JOINS: {}}
    values: dict[tuple[str, int], Values] = {}
    layouts: dict[tuple[int, int], JsonObject] = {}
    before: dict[tuple[int, int], tuple[int, list[str]]] = {}
    recording_s: dict[int, float] = {}
    steps: dict[StepPlace, RecordedStep] = {}
    for instance, line in lines:
        kind = line["kind"]
        if kind == recording.PROCESS:
            processes.setdefault(instance, RecordedProcess.of(line))
            before = {key: value for key, value in before.items() if key[0] != instance}
        elif kind == recording.QUESTION:
            questions.setdefault(Question(line["what"], line["file"], line["line"], line["where"]))
        elif kind == recording.CHECKPOINT:
            checkpoints.setdefault(line["directory"])
        elif kind in obstacles:
            obstacles[kind].setdefault(line["reason"])
        elif kind == recording.LAYOUT:
            layouts[instance, line["training"]] = line
        elif kind == recording.VALUES:
            places = {each["name"]: (each["dtype"], each["offset"], each["bytes"]) for each in line["arrays"]}
            values[line["part"], instance] = Values(folder / line["file"], places)
        elif kind == recording.STEP:
            place = line["training"], line["step"]
            layout = layouts[instance, line["training"]]
            start = line["start"]
            last = before.get((instance, place[0]))
            if start is None and last is not None and last[0] == place[1] - 1:
                start = last[1]
            _add_step(steps.setdefault(place, RecordedStep()), line, layout, start, instance)
            before[instance, place[0]] = place[1], line["variables"]
            recording_s[instance] = recording_s.get(instance, 0.0) + line["recording_s"]
    return Record(
        processes=tuple(processes[each] for each in sorted(processes)),
        steps=steps,
        questions=tuple(questions),
        checkpoints=tuple(checkpoints),
        obstacles=tuple(obstacles[recording.OBSTACLE]),
        obstacles_to_joins=tuple(obstacles[recording.OBSTACLE_TO_JOINS]),
        values=values,
        recording_s=max(recording_s.values(), default=0.0),
    )


def _add_step(step: RecordedStep, line: JsonObject, layout: JsonObject, start: list[str] | None, instance: int) -> None:
    own = (instance,)
    step.carried[instance] = range(*line["replicas"])
    for part, digests in ((START, start or ()), (GRADIENTS, line["gradients"]), (UPDATE, line["variables"])):
        for name, digest in zip(layout["variables"], digests, strict=False):
            step.add(part, name, digest, own)
    for name, digests in zip(layout["batch"], line["batch"], strict=True):
        for replica, digest in zip(step.carried[instance], digests, strict=False):
            step.add(BATCH, f"{name} of replica {replica}", digest, own)
    for name, value in line["metrics"].items():
        step.add(METRICS, name, value, own)
    if line["fingerprint"] is not None:  # it takes longest, so one instance computes it for all
        step.add(FINGERPRINT, "", line["fingerprint"], own)
    for name, state in line["random"].items():
        step.random.setdefault(name, set()).add(state)


def _lines_of(path: Path) -> list[JsonObject]:
    """Return all lines of a file, without an incomplete last line of an instance that was killed."""
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise PopRunError(f"the record {path} cannot be read: {error.strerror}; check its directory") from None
    lines = []
    for number, text in enumerate(texts):
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            if number != len(texts) - 1:
                raise PopRunError(
                    f"the record {path} is damaged in line {number + 1}; check that nothing else writes to it"
                ) from None
    return lines
