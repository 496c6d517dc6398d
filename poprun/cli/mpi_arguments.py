"""The user's options for mpirun, and the variables that their `-x` exports. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

_EXPORT = "-x"
_BINDING_OPTIONS = ("--bind-to", "--map-by", "--cpu-set", "--cpu-list", "--rankfile")


@dataclass(frozen=True)
class MpiArguments:
    """A list of options for mpirun, parsed.

    Attributes:
        words: The options, as the user wrote them.
        exports: The exported variables with their values. None: mpirun forwards the variable by name.
    """

    words: tuple[str, ...] = ()
    exports: Mapping[str, str | None] = field(default_factory=dict)

    @classmethod
    def read(cls, words: Sequence[str]) -> MpiArguments:
        """Read `-x NAME=value` and `-x NAME`; the last export of a name counts."""
        pairs = zip(words, words[1:], strict=False)
        written = [value.partition("=") for option, value in pairs if option == _EXPORT]
        return cls(tuple(words), {name: value if equals else None for name, equals, value in written})

    def without_exports(self, names: Collection[str]) -> list[str]:
        """Return the words without the exports of the named variables."""
        kept: list[str] = []
        rest = iter(self.words)
        for word in rest:
            exported = next(rest, None) if word == _EXPORT else None
            if exported is None or exported.partition("=")[0] not in names:
                kept += [word] if exported is None else [word, exported]
        return kept


@dataclass(frozen=True)
class JobArguments:
    """All options for mpirun in one job.

    Attributes:
        everywhere: The options for mpirun as a whole, given once.
        common: The options that every instance gets.
        instances: The options of each instance: the common ones, then its own.
        words: All words of the three.
    """

    everywhere: MpiArguments
    common: MpiArguments
    instances: tuple[MpiArguments, ...]
    words: tuple[str, ...]

    @classmethod
    def read(
        cls,
        everywhere: tuple[str, ...],
        common: tuple[str, ...],
        own: Iterable[tuple[int, tuple[str, ...]]],
        num_instances: int,
    ) -> JobArguments:
        """Read the options from the values of the three options of poprun."""
        words, special = everywhere + common, dict[int, tuple[str, ...]]()
        for index, more in own:
            words += more
            special[index] = special.get(index, common) + more
        read = MpiArguments.read(common)
        each = {index: MpiArguments.read(of_one) for index, of_one in special.items()}
        instances = tuple(each.get(index, read) for index in range(num_instances))
        return cls(MpiArguments.read(everywhere), read, instances, words)

    def of(self, index: int) -> MpiArguments:
        """Return the options of a process; reserves, which come after the instances, get the common ones."""
        return self.instances[index] if index < len(self.instances) else self.common

    @property
    def exports(self) -> frozenset[str]:
        """The names of all variables that are exported to any instance."""
        return frozenset(self.everywhere.exports).union(*(each.exports for each in self.instances))

    @property
    def names_binding(self) -> bool:
        """Whether the options decide on which CPUs or hosts processes run."""
        return any(word.partition("=")[0] in _BINDING_OPTIONS for word in self.words)


def export_options(*groups: Mapping[str, str | None]) -> list[str]:
    """Return `-x` options that export the variables of each group. A value of None forwards a variable by name."""
    words: list[str] = []
    for name, value in (item for group in groups for item in group.items()):
        words += [_EXPORT, name if value is None else f"{name}={value}"]
    return words
