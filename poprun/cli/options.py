"""The table of poprun's options. A new option is one new entry here and one new field of `Settings`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from poprun.cli.notes import IDLE
from poprun.cli.pages import USUAL_COLUMNS, wrap


class Kind(Enum):
    """What follows an option."""

    FLAG = "nothing"
    BOOLEAN = "yes or no"
    NUMBER = "a whole number"
    SECONDS = "a number of seconds"
    TEXT = "a word"
    PATH = "a path"
    HOSTS = "a list of hosts such as 'node[0-2],node7'"
    ARGUMENTS = "one string that is split like a shell does"
    METRICS = "where metrics go, such as csv:run.csv"
    FAULT = "a fault such as kill:instance=1,step=7"
    INSTANCE_ARGUMENTS = "the index of an instance, a colon and one string that is split like a shell does"


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        name: its long name, without dashes.
        kind: what follows it.
        help: one line for `--help`.
        section: the heading in `--help`.
        spellings: other ways to write it, with dashes.
        choices: the words that may follow; empty for any.
        default: as it is written in `--help`.
        at_least: the smallest number that may follow; None: whoever uses it knows.
        at_most: the largest one.
        if_bare: its value where no word follows that can be one; empty: one has to.
    """

    name: str
    kind: Kind
    help: str
    section: str
    spellings: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    default: str = ""
    at_least: int | None = 1
    at_most: int = 2**31 - 1
    if_bare: str = ""

    @property
    def is_repeatable(self) -> bool:
        """Whether a second occurrence adds to the first; otherwise it replaces the first."""
        return self.kind in (Kind.HOSTS, Kind.METRICS, Kind.FAULT, Kind.ARGUMENTS, Kind.INSTANCE_ARGUMENTS)

    @property
    def is_setting(self) -> bool:
        """Whether it belongs to a configuration file; the others say what this one call of poprun does."""
        return self.name not in _ONCE

    @property
    def is_rare(self) -> bool:
        """Whether `--help` leaves it to `--help-all`: most jobs do not need it, or it has no effect."""
        return self.section == VIPU or self.name in _RARE


_PLACEHOLDERS = {
    Kind.FLAG: "",
    Kind.BOOLEAN: "yes|no",
    Kind.NUMBER: "N",
    Kind.SECONDS: "SECONDS",
    Kind.TEXT: "WORD",
    Kind.PATH: "PATH",
    Kind.HOSTS: "HOSTS",
    Kind.METRICS: "SINK",
    Kind.FAULT: "FAULT",
    Kind.ARGUMENTS: '"ARGS"',
    Kind.INSTANCE_ARGUMENTS: 'N:"ARGS"',
}

GENERIC = "Generic"
TOPOLOGY = "Topology"
VIPU = "V-IPU"
EXECUTION = "Execution"
FAILURE = "Failure"
OUTPUT = "Output"
DEBUG = "Debug"

_MOST = 1_000_000
"""Of whatever is counted one by one: more is a slip of the keyboard."""

_ONCE = frozenset(
    (
        "help",
        "help-all",
        "version",
        "version-format",
        "import-config",
        "export-config",
        "overwrite-config",
        "dry-run",
        "json",
    )
)

_RARE = frozenset(
    (
        *("version-format", "overwrite-config", "json", "ipus-per-replica", "num-ilds", "sync-type", "numa-aware"),
        *(
            "timeline-limit",
            "profile",
            "top-address",
            "instance-mpi-local-args",
            "synchronise-poplar-sdk",
            "distribute-ssh-key",
            "restart-backoff-s",
            "debug",
        ),
    )
)

OPTIONS: tuple[Option, ...] = (
    Option("help", Kind.FLAG, "print the options that most jobs need and stop", GENERIC, spellings=("-h",)),
    Option("help-all", Kind.FLAG, "print all options and stop", GENERIC),
    Option("version", Kind.FLAG, "print the version and stop", GENERIC),
    Option(
        "version-format",
        Kind.TEXT,
        "how --version prints; the full forms list every dependency",
        GENERIC,
        choices=("text", "json", "full-text", "full-json"),
        default="text",
    ),
    Option("import-config", Kind.PATH, "read options from a TOML file; the command line wins", GENERIC),
    Option("export-config", Kind.PATH, "write the options in force to a TOML file", GENERIC),
    Option("overwrite-config", Kind.BOOLEAN, "let --export-config replace a file", GENERIC, default="no"),
    Option("verbose", Kind.FLAG, "say what happens", GENERIC, spellings=("-v",)),
    Option("vv", Kind.FLAG, "say how it happens, and show the topology", GENERIC, spellings=("-vv",)),
    Option("dry-run", Kind.FLAG, "print topology, placement and the mpirun command, run nothing", GENERIC),
    Option("json", Kind.FLAG, "with --dry-run: print all of it as JSON", GENERIC),
    Option("host", Kind.HOSTS, "hosts that run instances, e.g. 'node[0-2,4]'; default this machine", TOPOLOGY, ("-H",)),
    Option("hostfile", Kind.PATH, "a file of hosts, `name slots=N` on each line; excludes --host", TOPOLOGY),
    Option("host-subnet", Kind.TEXT, "the interface or network that hosts use, e.g. eth0 or 10.0.0.0/16", TOPOLOGY),
    Option(
        "num-replicas",
        Kind.NUMBER,
        "replicas of all instances together",
        TOPOLOGY,
        default="one for each instance",
        at_most=_MOST,
    ),
    Option(
        "num-instances",
        Kind.NUMBER,
        "processes on all hosts together; replicas are divided evenly",
        TOPOLOGY,
        spellings=("-n", "-np", "--np"),
        default="1",
        at_most=_MOST,
    ),
    Option("ipus-per-replica", Kind.NUMBER, "devices that one replica spans", TOPOLOGY, default="1", at_most=_MOST),
    Option("num-ilds", Kind.NUMBER, "IPU-Link domains; instances are divided evenly", TOPOLOGY),
    Option("sync-type", Kind.TEXT, "how a partition synchronises, e.g. ST_POD_NATIVE_DEFAULT", TOPOLOGY),
    Option("print-topology", Kind.BOOLEAN, "show which instance drives which replicas", TOPOLOGY, default="no"),
    Option("vipu-server-host", Kind.TEXT, "host of the V-IPU server", VIPU, default="localhost"),
    Option("vipu-server-port", Kind.NUMBER, "its port", VIPU, default="8090", at_most=65535),
    Option("vipu-server-timeout", Kind.NUMBER, "seconds that a request may take", VIPU, default="120"),
    Option("vipu-partition", Kind.TEXT, "a simulated partition: a name, or a device map FILE.toml", VIPU),
    Option("vipu-partition-attempts", Kind.NUMBER, "tries at binding to the partition", VIPU, default="1"),
    Option("vipu-cluster", Kind.TEXT, "deprecated: see --vipu-allocation", VIPU),
    Option("vipu-allocation", Kind.TEXT, "where a partition is created", VIPU),
    Option("update-partition", Kind.BOOLEAN, "change the partition if it does not fit", VIPU, default="no"),
    Option("reset-partition", Kind.BOOLEAN, "reset the partition before the run", VIPU),
    Option("remove-partition", Kind.BOOLEAN, "remove a partition that poprun has created", VIPU, default="yes"),
    Option("executable-cache-path", Kind.PATH, "directory of compiled executables, for the programs", EXECUTION),
    Option("mpi-global-args", Kind.ARGUMENTS, "options for mpirun, given once at the front; adds up", EXECUTION),
    Option("mpi-local-args", Kind.ARGUMENTS, "options for mpirun, given for each instance; adds up", EXECUTION),
    Option(
        "instance-mpi-local-args",
        Kind.INSTANCE_ARGUMENTS,
        "options for mpirun, given for one instance; adds up",
        EXECUTION,
    ),
    Option("allow-run-as-root", Kind.BOOLEAN, "let mpirun run as root", EXECUTION, default="no"),
    Option(
        "process-placement",
        Kind.TEXT,
        "spreadnuma: each instance on cores of its own; cores, sockets: one for each in turn; disabled: anywhere",
        EXECUTION,
        choices=("spreadnuma", "disabled", "cores", "sockets"),
        default="spreadnuma",
    ),
    Option("numa-aware", Kind.BOOLEAN, "deprecated: see --process-placement", EXECUTION),
    Option(
        "torch-distributed-env",
        Kind.BOOLEAN,
        "set RANK, WORLD_SIZE, MASTER_ADDR and others, by which torch.distributed, accelerate, Lightning meet",
        EXECUTION,
        default="no",
    ),
    Option("offline-mode", Kind.BOOLEAN, "do not use accelerators, compute on the CPU", EXECUTION, default="no"),
    Option(
        "synchronise-python-venv", Kind.BOOLEAN, "copy the Python environment to the hosts", EXECUTION, default="no"
    ),
    Option(
        "synchronise-poplar-sdk",
        Kind.BOOLEAN,
        "would copy a Poplar SDK",
        EXECUTION,
        default="no",
    ),
    Option("distribute-ssh-key", Kind.BOOLEAN, "install the ssh key on the hosts", EXECUTION, default="no"),
    Option("skip-checks", Kind.FLAG, "do not examine the hosts before the launch", EXECUTION),
    Option("start-timeout-s", Kind.SECONDS, "until then every instance must have started", EXECUTION, default="60"),
    Option("host-timeout-s", Kind.SECONDS, "the silence after which a host is lost", EXECUTION, default="10"),
    Option(
        "on-failure",
        Kind.TEXT,
        "what happens when an instance fails: stop ends the job, shrink lets the others go on, restart starts it again",
        FAILURE,
        choices=("stop", "shrink", "restart"),
        default="stop",
    ),
    Option("max-restarts", Kind.NUMBER, "how often it is started again at most", FAILURE, default="3", at_least=0),
    Option(
        "restart-backoff-s",
        Kind.SECONDS,
        "the pause before the first restart; it doubles from one to the next",
        FAILURE,
        default="1",
        at_least=0,
    ),
    Option(
        "min-instances",
        Kind.NUMBER,
        "the fewest instances that go on or are started again",
        FAILURE,
        default="1",
    ),
    Option(
        "stuck-timeout-s",
        Kind.SECONDS,
        "after so long an instance that others wait for and that does nothing is a failure; 0: never",
        FAILURE,
        default="300",
        at_least=0,
    ),
    Option("inject", Kind.FAULT, "let something go wrong, e.g. kill:instance=1,step=7; adds up", FAILURE),
    Option("only-output-from-instance", Kind.NUMBER, "show the output of this instance only", OUTPUT, at_least=None),
    Option(
        "no-tags",
        Kind.FLAG,
        "show lines without [1,N]<stdout>: in front; so does one instance where standard output is a pipe of its own",
        OUTPUT,
    ),
    Option("tag-host", Kind.FLAG, "show the host in front of each line too", OUTPUT),
    Option("timestamps", Kind.FLAG, "show the time in front of each line", OUTPUT),
    Option("output-dir", Kind.PATH, "also write each instance's output to files in this directory", OUTPUT),
    Option(
        "metrics",
        Kind.METRICS,
        "write the metrics of every step there: csv:FILE, jsonl:FILE, tensorboard:FOLDER, prometheus:[HOST:]PORT, "
        "mlflow[:URI], wandb[:PROJECT]; adds up",
        OUTPUT,
    ),
    Option("timeline", Kind.PATH, "record what instances do, and write it to this file, for Perfetto", OUTPUT),
    Option("timeline-limit", Kind.NUMBER, "MB that one instance may record", OUTPUT, default="256", at_most=_MOST),
    Option(
        "profile",
        Kind.TEXT,
        "put what the profiler of jax or torch sees of five steps into the timeline; jax:20@100: of 20, after 100",
        OUTPUT,
    ),
    Option(
        "summary",
        Kind.TEXT,
        "what is said when the job is over: yes, no (three lines, or none), or json:FILE",
        OUTPUT,
        default="yes on a terminal",
    ),
    Option("top-address", Kind.TEXT, "HOST:PORT where poprun top on other hosts may look at the job", OUTPUT),
    Option("debug", Kind.FLAG, "say everything: as -vv, and every setting in force", DEBUG),
)


def describe_options(columns: int = USUAL_COLUMNS, with_rare: bool = False) -> str:
    """The text of `--help` or, with the rare options, of `--help-all`."""
    options = [option for option in OPTIONS if with_rare or not option.is_rare]
    sections = dict.fromkeys(option.section for option in options)
    blocks = [describe_section(section, options, columns) for section in sections]
    more = [] if with_rare else [wrap(_MORE, columns)]
    return "\n\n".join([_USAGE, wrap(_WORDS, columns), *blocks, *more])


def describe_section(section: str, options: Sequence[Option] = OPTIONS, columns: int = USUAL_COLUMNS) -> str:
    """Its heading and the options of it that are among these."""
    rows = [(_spell(option), _explain(option)) for option in options if option.section == section]
    return "\n".join([f"{section} options:", *(_describe(left, right, columns) for left, right in rows)])


_USAGE = """\
usage: poprun [options] program [program arguments]
       poprun doctor [--host HOSTS] [--json]
       poprun verify [options] program [program arguments]
       poprun timeline merge|report FOLDER [options]
       poprun top [--job PID | --address HOST:PORT]
       poprun simulate all-reduce|plot|measure [options]

example, 8 replicas in 2 processes:
       poprun -n 2 --num-replicas 8 python train.py"""

_WORDS = (
    "Options end at the first other word. doctor examines the hosts, and starts nothing. verify proves that the "
    "program has the same bits however its replicas are spread; see poprun verify --help. "
    "timeline shows what a job did that was recorded; see poprun timeline --help. "
    "top shows what a job does that is running; see poprun top --help. "
    "simulate says what an all-reduce costs on hosts that are not there; see poprun simulate --help."
)
_MORE = "poprun --help-all lists the other options, those for partitions and those without effect among them."

_LEFT = 26
"""The columns of an option and what follows it; one that needs more has its explanation in the next lines."""


def _describe(left: str, right: str, columns: int) -> str:
    if columns < 2 * _LEFT + 16:
        return f"  {left}\n{wrap(right, columns, 6)}"
    start = f"  {left:<{_LEFT}}  "
    text = wrap(right, columns, len(start) if len(start) <= _LEFT + 4 else _LEFT + 4)
    return start + text.lstrip() if len(left) <= _LEFT else f"  {left}\n{text}"


def _spell(option: Option) -> str:
    names = " ".join((*option.spellings, f"--{option.name}"))
    return f"{names} {_PLACEHOLDERS[option.kind]}".rstrip()


def _explain(option: Option) -> str:
    notes = [f"one of {', '.join(option.choices)}"] if option.choices else []
    notes += [f"default {option.default}"] if option.default else []
    notes += ["without effect"] if option.name in IDLE else []
    return option.help + (f" ({'; '.join(notes)})" if notes else "")
