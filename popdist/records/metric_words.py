"""The destinations of metrics as words of `poprun --metrics` and POPDIST_METRICS; loads no library."""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from popdist.errors import EnvironmentMismatchError

VARIABLE = "POPDIST_METRICS"
"""Sinks of metrics, separated by commas, the same on all instances: `--metrics`, with absolute paths."""
RUN_VARIABLE = "POPDIST_METRICS_RUN"
"""Name of the run in MLflow or W&B, which all instances and restarts of a job share."""

CSV, JSON_LINES, TENSORBOARD, PROMETHEUS, MLFLOW, WANDB = "csv", "jsonl", "tensorboard", "prometheus", "mlflow", "wandb"
FORMS = {
    CSV: "csv:FILE",
    JSON_LINES: "jsonl:FILE",
    TENSORBOARD: "tensorboard:FOLDER",
    PROMETHEUS: "prometheus:[HOST:]PORT",
    MLFLOW: "mlflow[:URI]",
    WANDB: "wandb[:PROJECT]",
}
"""The syntax of each kind of word."""
FILES = (CSV, JSON_LINES)
_MAY_BE_BARE = (MLFLOW, WANDB)
LIBRARIES = {
    TENSORBOARD: ("tensorboard", "tensorboard"),
    PROMETHEUS: ("prometheus_client", "prometheus_client"),
    MLFLOW: ("mlflow", "mlflow-skinny"),
    WANDB: ("wandb", "wandb"),
}
"""The module for a kind, and the distribution to install for it."""
LOCALHOST = "127.0.0.1"


@dataclass(frozen=True)
class MetricWord:
    """A destination of metrics.

    Attributes:
        kind: Kind of destination, one of `FORMS`.
        target: File, folder, address, URI or project.

    Raises:
        ValueError: The kind is unknown, or it needs another target.
    """

    kind: str
    target: str = ""

    def __post_init__(self) -> None:
        if self.kind not in FORMS:
            raise ValueError(f"{self}: {self.kind!r} is no kind of destination; use one of {', '.join(FORMS.values())}")
        if not self.target and self.kind not in _MAY_BE_BARE:
            raise ValueError(f"{self}: the target is missing; write {FORMS[self.kind]}")
        if self.kind == PROMETHEUS:
            _ = self.address

    def __str__(self) -> str:
        return f"{self.kind}:{self.target}" if self.target else self.kind

    @classmethod
    def parse(cls, text: str) -> MetricWord:
        """Parse a word.

        Raises:
            ValueError: The word is invalid.
        """
        kind, _, target = text.strip().partition(":")
        return cls(kind, target)

    @property
    def is_path(self) -> bool:
        """Whether the target is a file or a folder."""
        return self.kind in FILES or self.kind == TENSORBOARD

    @property
    def path(self) -> Path:
        """The absolute path of the file or folder."""
        return Path(self.target).expanduser().absolute()

    @property
    def address(self) -> tuple[str, int]:
        """The host (default: this host only) and the port.

        Raises:
            ValueError: The target is no address.
        """
        host, _, port = self.target.rpartition(":")
        if not (port.isascii() and port.isdecimal()) or int(port) > 65535:
            raise ValueError(f"{self}: {port!r} is no port; write {FORMS[PROMETHEUS]} with a port of 0 to 65535")
        return host.removeprefix("[").removesuffix("]") or LOCALHOST, int(port)

    @property
    def absolute(self) -> MetricWord:
        """The same word with an absolute path, so that it does not depend on the working directory."""
        return MetricWord(self.kind, str(self.path)) if self.is_path else self


def parse_words(texts: Sequence[str]) -> tuple[MetricWord, ...]:
    """Parse words from several texts, each with words separated by commas.

    Raises:
        ValueError: A word is invalid, or two words name the same destination.
    """
    words = tuple(MetricWord.parse(part) for text in texts for part in text.split(",") if part.strip())
    targets = [word.absolute for word in words]
    if twice := [word for number, word in enumerate(words) if targets[number] in targets[:number]]:
        raise ValueError(f"{twice[0]}: metrics would go there twice; leave one out")
    return words


def words_in(environ: Mapping[str, str]) -> tuple[MetricWord, ...]:
    """Read the words from the environment; the result may be empty.

    Raises:
        EnvironmentMismatchError: A word is invalid.
    """
    try:
        return parse_words([environ.get(VARIABLE, "")])
    except ValueError as error:
        raise EnvironmentMismatchError(f"{VARIABLE}={environ[VARIABLE]!r}: {error}") from None


def fault_of(word: MetricWord) -> str:
    """Return why this process cannot write metrics there, with advice; "" if no obstacle is known."""
    return fault_of_library(word) or fault_of_place(word)


def fault_of_place(word: MetricWord) -> str:
    """Return why the file, folder or address cannot be used, with advice; "" if no obstacle is known."""
    return _fault_of_path(word) if word.is_path else _fault_of_address(word)


def fault_of_library(word: MetricWord) -> str:
    """Return which library is missing, with advice; "" if all are installed."""
    module, distribution = LIBRARIES.get(word.kind, ("", ""))
    if not module or importlib.util.find_spec(module) is not None:
        return ""
    return f"{word}: {module} is not installed; run: pip install {distribution}"


def _fault_of_path(word: MetricWord) -> str:
    """Return what keeps the file or folder from being made, or ""; special files such as pipes are accepted."""
    path = word.path
    is_folder = word.kind == TENSORBOARD
    if path.exists() and path.is_dir() != is_folder:
        return f"{word}: it is {'no' if is_folder else 'a'} folder; write {FORMS[word.kind]}"
    nearest = next(parent for parent in (path, *path.parents) if parent.exists())
    if not os.access(nearest, os.W_OK):
        return f"{word}: {nearest} cannot be written; name another {'folder' if is_folder else 'file'}"
    if nearest not in (path, path.parent) and not nearest.is_dir():
        return f"{word}: {nearest} is no folder; name another one"
    return ""


def _fault_of_address(word: MetricWord) -> str:
    if word.kind != PROMETHEUS:
        return ""
    host, port = word.address
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
            tried.listen()
    except OSError as error:
        reason = error.strerror or error
        return f"{word}: the metrics server cannot listen at this address ({reason}); name another address of this host"
    return ""
