"""The options of poprun. A new option is one new field here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial

from poprun.cli.options import (
    NO_PARTITION,
    NO_SDK,
    NO_SERVER,
    OFFLINE,
    ONE_HOST,
    STOPS,
    Option,
    OptionKind,
    option,
    options_of,
)

GENERIC = "Generic"
TOPOLOGY = "Topology"
VIPU = "V-IPU"
EXECUTION = "Execution"
FAILURE = "Failure"
OUTPUT = "Output"
DEBUG = "Debug"

generic, topology, execution = (partial(option, section=each) for each in (GENERIC, TOPOLOGY, EXECUTION))
failure, output, debugging = (partial(option, section=each) for each in (FAILURE, OUTPUT, DEBUG))
vipu = partial(option, section=VIPU, rare=True)
idle_vipu = partial(option, section=VIPU, without_effect=NO_SERVER)

_MOST = 1_000_000
"""The largest number of things that are counted one by one: more is a slip of the keyboard."""

FLAG, BOOLEAN, NUMBER, SECONDS = OptionKind.FLAG, OptionKind.BOOLEAN, OptionKind.NUMBER, OptionKind.SECONDS
TEXT, PATH, HOSTS, ARGUMENTS = OptionKind.TEXT, OptionKind.PATH, OptionKind.HOSTS, OptionKind.ARGUMENTS


@dataclass(frozen=True)
class LaunchOptions(ABC):
    """The options of poprun, each with its value for one launch.

    Attributes:
        program: the program and its arguments.
        metrics_run: a name of this job that no other job has, for services; a job that is restarted keeps it.
    """

    program: tuple[str, ...]
    help: bool = generic(False, FLAG, "print the options that most jobs need and stop", "-h", once=True)
    help_all: bool = generic(False, FLAG, "print all options and stop", once=True)
    version: bool = generic(False, FLAG, "print the version and stop", once=True)
    version_format: str = generic(
        "text",
        TEXT,
        "how --version prints; the full forms list every dependency",
        choices=("text", "json", "full-text", "full-json"),
        rare=True,
        once=True,
    )
    import_config: str | None = generic(
        None, PATH, "read options from a TOML file; the command line wins", once=True, see="#configuration-files"
    )
    export_config: str | None = generic(None, PATH, "write the options in force to a TOML file", once=True)
    overwrite_config: bool = generic(False, BOOLEAN, "let --export-config replace a file", rare=True, once=True)
    verbose: bool = generic(False, FLAG, "say what happens", "-v")
    vv: bool = generic(False, FLAG, "say how it happens, and show the topology", "-vv")
    dry_run: bool = generic(
        False, FLAG, "print topology, placement and the mpirun command, run nothing", once=True, see="#dry-runs"
    )
    json: bool = generic(False, FLAG, "with --dry-run: print all of it as JSON", rare=True, once=True)
    host: tuple[str, ...] = topology(
        (), HOSTS, "hosts that run instances, e.g. 'node[0-2,4]'; default this machine", "-H", see="hosts.md"
    )
    hostfile: str | None = topology(
        None, PATH, "a file of hosts, `name slots=N` on each line; excludes --host", see="hosts.md"
    )
    host_subnet: str | None = topology(
        None, TEXT, "the interface or network that hosts use, e.g. eth0 or 10.0.0.0/16", without_effect=ONE_HOST
    )
    num_replicas: int = topology(
        1, NUMBER, "replicas of all instances together", shown="one for each instance", at_most=_MOST
    )
    num_instances: int = topology(
        1, NUMBER, "processes on all hosts together; replicas are divided evenly", *("-n", "-np", "--np"), at_most=_MOST
    )
    ipus_per_replica: int = topology(
        1, NUMBER, "devices that one replica spans", at_most=_MOST, rare=True, see="partitions.md"
    )
    num_ilds: int | None = topology(
        None, NUMBER, "IPU-Link domains; instances are divided evenly", rare=True, see="partitions.md"
    )
    sync_type: str | None = topology(
        None, TEXT, "how a partition synchronises, e.g. ST_POD_NATIVE_DEFAULT", without_effect=NO_SERVER
    )
    print_topology: bool = topology(False, BOOLEAN, "show which instance drives which replicas")
    vipu_server_host: str = idle_vipu("localhost", TEXT, "host of the V-IPU server")
    vipu_server_port: int = idle_vipu(8090, NUMBER, "its port", at_most=65535)
    vipu_server_timeout: int = idle_vipu(120, NUMBER, "seconds that a request may take")
    vipu_partition: str | None = vipu(
        None,
        TEXT,
        "a simulated partition: a name, or a device map FILE.toml",
        without_effect=OFFLINE,
        see="partitions.md",
    )
    vipu_partition_attempts: int = idle_vipu(1, NUMBER, "tries at binding to the partition")
    vipu_cluster: str | None = idle_vipu(
        None, TEXT, "deprecated: see --vipu-allocation", deprecated="--vipu-allocation has replaced it"
    )
    vipu_allocation: str | None = idle_vipu(None, TEXT, "where a partition is created")
    update_partition: bool = vipu(
        False, BOOLEAN, "change the partition if it does not fit", without_effect=NO_PARTITION, see="partitions.md"
    )
    reset_partition: bool | None = idle_vipu(None, BOOLEAN, "reset the partition before the run")
    remove_partition: bool = idle_vipu(True, BOOLEAN, "remove a partition that poprun has created")
    executable_cache_path: str | None = execution(
        None, PATH, "directory of compiled executables, for the programs", see="compilation.md"
    )
    mpi_global_args: tuple[str, ...] = execution((), ARGUMENTS, "options for mpirun, given once at the front; adds up")
    mpi_local_args: tuple[str, ...] = execution((), ARGUMENTS, "options for mpirun, given for each instance; adds up")
    instance_mpi_local_args: tuple[tuple[int, tuple[str, ...]], ...] = execution(
        (), OptionKind.INSTANCE_ARGUMENTS, "options for mpirun, given for one instance; adds up", rare=True
    )
    allow_run_as_root: bool = execution(False, BOOLEAN, "let mpirun run as root")
    process_placement: str = execution(
        "spreadnuma",
        TEXT,
        "spreadnuma: each instance on cores of its own; cores, sockets: one for each in turn; disabled: anywhere",
        choices=("spreadnuma", "disabled", "cores", "sockets"),
        see="#pinning",
    )
    numa_aware: bool | None = execution(
        None,
        BOOLEAN,
        "deprecated: see --process-placement",
        deprecated="--process-placement spreadnuma, the default, gives each instance NUMA nodes of its own",
    )
    torch_distributed_env: bool = execution(
        False,
        BOOLEAN,
        "set RANK, WORLD_SIZE, MASTER_ADDR and others, by which torch.distributed, accelerate, Lightning meet",
        see="#other-libraries",
    )
    offline_mode: bool = execution(False, BOOLEAN, "do not use accelerators, compute on the CPU")
    synchronise_python_venv: bool = execution(
        False, BOOLEAN, "copy the Python environment to the hosts", without_effect=ONE_HOST, see="hosts.md"
    )
    synchronise_poplar_sdk: bool = execution(False, BOOLEAN, "would copy a Poplar SDK", without_effect=NO_SDK)
    distribute_ssh_key: bool = execution(
        False, BOOLEAN, "install the ssh key on the hosts", rare=True, without_effect=ONE_HOST, see="hosts.md"
    )
    skip_checks: bool = execution(False, FLAG, "do not examine the hosts before the launch", without_effect=ONE_HOST)
    start_timeout_s: float = execution(60, SECONDS, "until then every instance must have started")
    host_timeout_s: float = execution(10, SECONDS, "the silence after which a host is lost", without_effect=ONE_HOST)
    on_failure: str = failure(
        "stop",
        TEXT,
        "what happens when an instance fails: stop ends the job, shrink lets the others go on, restart starts it again",
        choices=("stop", "shrink", "restart"),
        see="surviving.md",
    )
    max_restarts: int = failure(3, NUMBER, "how often it is started again at most", at_least=0, without_effect=STOPS)
    restart_backoff_s: float = failure(
        1,
        SECONDS,
        "the pause before the first restart; it doubles from one to the next",
        at_least=0,
        rare=True,
        without_effect=STOPS,
    )
    min_instances: int = failure(
        1, NUMBER, "the fewest instances that go on or are started again", without_effect=STOPS
    )
    stuck_timeout_s: float = failure(
        300,
        SECONDS,
        "after so long an instance that others wait for and that does nothing is a failure; 0: never",
        at_least=0,
    )
    inject: tuple[str, ...] = failure(
        (), OptionKind.FAULT, "let something go wrong, e.g. kill:instance=1,step=7; adds up", see="faults.md"
    )
    only_output_from_instance: int | None = output(
        None, NUMBER, "show the output of this instance only", at_least=None, see="output.md"
    )
    no_tags: bool = output(
        False,
        FLAG,
        "show lines without [1,N]<stdout>: in front; so does one instance where standard output is a pipe of its own",
        see="output.md",
    )
    tag_host: bool = output(False, FLAG, "show the host in front of each line too")
    timestamps: bool = output(False, FLAG, "show the time in front of each line")
    output_dir: str | None = output(
        None, PATH, "also write each instance's output to files in this directory", see="output.md"
    )
    metrics: tuple[str, ...] = output(
        (),
        OptionKind.METRICS,
        "write the metrics of every step there: csv:FILE, jsonl:FILE, tensorboard:FOLDER, prometheus:[HOST:]PORT, "
        "mlflow[:URI], wandb[:PROJECT]; adds up",
        see="metrics.md",
    )
    metrics_run: str = ""
    timeline: str | None = output(
        None, PATH, "record what instances do, and write it to this file, for Perfetto", see="timelines.md"
    )
    timeline_limit: int | None = output(
        None, NUMBER, "MB that one instance may record", shown="256", at_most=_MOST, rare=True
    )
    profile: str | None = output(
        None,
        TEXT,
        "put what the profiler of jax or torch sees of five steps into the timeline; jax:20@100: of 20, after 100",
        rare=True,
        see="timelines.md",
    )
    summary: str = output(
        "",
        TEXT,
        "what is said when the job is over: yes, no (three lines, or none), or json:FILE",
        shown="yes on a terminal",
        see="summary.md",
    )
    top_address: str | None = output(
        None,
        TEXT,
        "HOST:PORT where poprun top on other hosts may look at the job",
        rare=True,
        see="progress.md",
    )
    debug: bool = debugging(False, FLAG, "say everything: as -vv, and every setting in force", rare=True)

    @abstractmethod
    def __post_init__(self) -> None:
        """Check each option, and what they say together.

        Raises:
            UsageError: options are out of range, or exclude each other.
        """


OPTIONS: tuple[Option, ...] = options_of(LaunchOptions)
"""The options of poprun, in the order of `--help`."""
