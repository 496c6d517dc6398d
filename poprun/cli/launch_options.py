"""The options of poprun. To add an option, add a field here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial

from poprun.cli.options import (
    NO_SDK,
    NO_SERVER,
    NO_SPARES,
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

_MOST = 1_000_000
"""The largest value of options that count things; a larger number is probably a typing error."""

FLAG, BOOLEAN, NUMBER, SECONDS = OptionKind.FLAG, OptionKind.BOOLEAN, OptionKind.NUMBER, OptionKind.SECONDS
TEXT, PATH, HOSTS, ARGUMENTS = OptionKind.TEXT, OptionKind.PATH, OptionKind.HOSTS, OptionKind.ARGUMENTS


@dataclass(frozen=True)
class LaunchOptions(ABC):
    """The options of poprun, each with its value for one launch.

    Attributes:
        program: The program and its arguments.
        metrics_run: A unique name of this job for metrics services; a restarted job keeps its name.
    """

    program: tuple[str, ...]
    help: bool = generic(False, FLAG, "print the options that most jobs need, and exit", "-h", once=True)
    help_all: bool = generic(False, FLAG, "print all options, and exit", once=True)
    version: bool = generic(False, FLAG, "print the version, and exit", once=True)
    version_format: str = generic(
        "text",
        TEXT,
        "the form of --version; the full forms list every dependency",
        choices=("text", "json", "full-text", "full-json"),
        rare=True,
        once=True,
    )
    import_config: str | None = generic(
        None,
        PATH,
        "read options from a TOML file; options on the command line take precedence",
        once=True,
        see="#configuration-files",
    )
    export_config: str | None = generic(None, PATH, "write the options in effect to a TOML file", once=True)
    overwrite_config: bool = generic(False, BOOLEAN, "let --export-config replace a file", rare=True, once=True)
    verbose: bool = generic(False, FLAG, "log what happens", "-v")
    vv: bool = generic(False, FLAG, "log more details, and show the topology", "-vv")
    dry_run: bool = generic(
        False, FLAG, "print topology, placement and the mpirun command; run nothing", once=True, see="#dry-runs"
    )
    json: bool = generic(False, FLAG, "with --dry-run: print the same as JSON", rare=True, once=True)
    host: tuple[str, ...] = topology(
        (), HOSTS, "hosts to run instances on, e.g. 'node[0-2,4]'; without it, this machine", "-H", see="hosts.md"
    )
    hostfile: str | None = topology(
        None, PATH, "a file with a host on each line, `name slots=N`; excludes --host", see="hosts.md"
    )
    host_subnet: str | None = topology(
        None,
        TEXT,
        "the interface or network that connects the hosts, e.g. eth0 or 10.0.0.0/16",
        without_effect=ONE_HOST,
    )
    num_replicas: int = topology(
        1, NUMBER, "number of replicas of all instances together", shown="one for each instance", at_most=_MOST
    )
    num_instances: int = topology(
        1,
        OptionKind.INSTANCES,
        "number of processes on all hosts; must divide --num-replicas; 4:6 starts 4 instances and 2 spares",
        *("-n", "-np", "--np"),
        at_most=_MOST,
    )
    spares: int = topology(
        0,
        NUMBER,
        "number of further processes, which take the place of lost instances",
        at_least=0,
        at_most=_MOST,
        see="spares.md",
    )
    spares_oversubscribe: bool = topology(
        False,
        BOOLEAN,
        "let spares share cores with instances, and need no slots",
        rare=True,
        without_effect=NO_SPARES,
        see="spares.md",
    )
    ipus_per_replica: int = topology(
        1, NUMBER, "number of devices that one replica spans", at_most=_MOST, rare=True, see="partitions.md"
    )
    num_ilds: int | None = topology(
        None, NUMBER, "number of IPU-Link domains; must divide --num-instances", rare=True, see="partitions.md"
    )
    print_topology: bool = topology(False, BOOLEAN, "show which instance drives which replicas")
    vipu_partition: str | None = option(
        None,
        TEXT,
        "name of a simulated partition, which gives each instance its device id",
        section=VIPU,
        rare=True,
        without_effect=OFFLINE,
        see="partitions.md",
    )
    executable_cache_path: str | None = execution(
        None, PATH, "folder in which programs keep compiled executables", see="compilation.md"
    )
    mpi_global_args: tuple[str, ...] = execution((), ARGUMENTS, "options for mpirun as a whole; may be repeated")
    mpi_local_args: tuple[str, ...] = execution(
        (), ARGUMENTS, "options for mpirun, for every instance; may be repeated"
    )
    instance_mpi_local_args: tuple[tuple[int, tuple[str, ...]], ...] = execution(
        (), OptionKind.INSTANCE_ARGUMENTS, "options for mpirun, for one instance; may be repeated", rare=True
    )
    allow_run_as_root: bool = execution(False, BOOLEAN, "let mpirun run as root")
    process_placement: str = execution(
        "spreadnuma",
        TEXT,
        "CPUs of each instance: spreadnuma: its own; cores, sockets: one core or socket in turn; disabled: any",
        choices=("spreadnuma", "disabled", "cores", "sockets"),
        see="#pinning",
    )
    offline_mode: bool = execution(False, BOOLEAN, "compute on CPUs, without accelerators")
    synchronise_python_venv: bool = execution(
        False, BOOLEAN, "copy the Python environment to the hosts", without_effect=ONE_HOST, see="hosts.md"
    )
    distribute_ssh_key: bool = execution(
        False, BOOLEAN, "install the ssh key on the hosts", rare=True, without_effect=ONE_HOST, see="hosts.md"
    )
    skip_checks: bool = execution(False, FLAG, "do not examine the hosts before the launch", without_effect=ONE_HOST)
    start_timeout_s: float = execution(60, SECONDS, "time limit for all instances to start")
    host_timeout_s: float = execution(10, SECONDS, "silence after which a host counts as lost", without_effect=ONE_HOST)
    on_failure: str = failure(
        "stop",
        TEXT,
        "if an instance fails: stop ends the job, shrink continues without it, replace lets a spare take its place, "
        "restart starts the job again",
        shown="stop, with spares replace",
        choices=("stop", "shrink", "replace", "restart"),
        see="surviving.md",
    )
    regrow: bool = failure(
        False,
        BOOLEAN,
        "start new instances in the places of lost ones, at most --max-restarts; they join between two steps",
        without_effect=STOPS,
        see="growing_back.md",
    )
    max_restarts: int = failure(
        3, NUMBER, "largest number of restarts, and of new instances", at_least=0, without_effect=STOPS
    )
    restart_backoff_s: float = failure(
        1,
        SECONDS,
        "pause before the first restart; each further pause is twice as long",
        at_least=0,
        rare=True,
        without_effect=STOPS,
    )
    min_instances: int = failure(
        1, NUMBER, "smallest number of instances to continue or restart with", without_effect=STOPS
    )
    on_notice: str = failure(
        "save",
        TEXT,
        "if SIGUSR1 comes to the agents of a host: save passes it on, so that programs save and leave; leave-host lets "
        "other hosts take over from this one",
        choices=("save", "leave-host"),
        without_effect=NO_SPARES,
        see="resizing.md#before-a-host-goes-away",
    )
    stuck_timeout_s: float = failure(
        300,
        SECONDS,
        "an instance that others wait for, and that is idle for this long, has failed; 0: never",
        at_least=0,
    )
    inject: tuple[str, ...] = failure(
        (), OptionKind.FAULT, "inject a fault, e.g. kill:instance=1,step=7; may be repeated", see="faults.md"
    )
    only_output_from_instance: int | None = output(
        None, NUMBER, "show the output of this instance only", at_least=None, see="output.md"
    )
    no_tags: bool = output(
        False,
        FLAG,
        "show lines without [1,N]<stdout>: in front; the default for one instance whose standard output is a pipe",
        see="output.md",
    )
    tag_host: bool = output(False, FLAG, "also show the host in front of each line")
    timestamps: bool = output(False, FLAG, "show the time in front of each line")
    output_dir: str | None = output(
        None, PATH, "also write each instance's output to files in this directory", see="output.md"
    )
    metrics: tuple[str, ...] = output(
        (),
        OptionKind.METRICS,
        "write the metrics of every step to csv:FILE, jsonl:FILE, tensorboard:FOLDER, prometheus:[HOST:]PORT, "
        "mlflow[:URI] or wandb[:PROJECT]; may be repeated",
        see="metrics.md",
    )
    metrics_run: str = ""
    norms_every: int = output(
        0,
        NUMBER,
        "steps from one look at the norms of weights and gradients to the next, for --metrics and --timeline; 0: never",
        at_least=0,
        at_most=_MOST,
        see="distributions.md",
    )
    histograms_every: int = output(
        0,
        NUMBER,
        "steps from one look at the histograms of weights and gradients to the next, for --metrics; 0: never",
        at_least=0,
        at_most=_MOST,
        see="distributions.md",
    )
    timeline: str | None = output(
        None, PATH, "record what instances do, and write a timeline for Perfetto to this file", see="timelines.md"
    )
    timeline_limit: int | None = output(
        None, NUMBER, "largest recording of one instance, in MB", shown="256", at_most=_MOST, rare=True
    )
    profile: str | None = output(
        None,
        TEXT,
        "with --timeline: profiler to record five steps with, jax or torch; jax:20@100: 20 steps after step 100",
        rare=True,
        see="timelines.md",
    )
    summary: str = output(
        "",
        TEXT,
        "summary at the end of the job: yes (three lines), no, or json:FILE",
        shown="yes on a terminal",
        see="summary.md",
    )
    debug: bool = debugging(False, FLAG, "log everything: as -vv, and every option in effect", rare=True)

    @abstractmethod
    def __post_init__(self) -> None:
        """Check each option, and the options together.

        Raises:
            UsageError: An option is out of range, or options exclude each other.
        """


_of_server = partial(Option, section=VIPU, without_effect=NO_SERVER)

ACCEPTED: tuple[Option, ...] = (
    _of_server("sync-type", TEXT, "synchronisation of the partition, e.g. ST_POD_NATIVE_DEFAULT", section=TOPOLOGY),
    _of_server("vipu-server-host", TEXT, "host of the V-IPU server"),
    _of_server("vipu-server-port", NUMBER, "port of the server", at_most=65535),
    _of_server("vipu-server-timeout", NUMBER, "limit in seconds for a request to the server"),
    _of_server("vipu-partition-attempts", NUMBER, "number of attempts to bind to the partition"),
    _of_server(
        "vipu-cluster",
        TEXT,
        "deprecated in favour of --vipu-allocation",
        deprecated="leave it out (--vipu-allocation replaces it, and has no effect either)",
    ),
    _of_server("vipu-allocation", TEXT, "allocation in which to create a partition"),
    _of_server("update-partition", BOOLEAN, "change the partition if it does not fit"),
    _of_server("reset-partition", BOOLEAN, "reset the partition before the run"),
    _of_server("remove-partition", BOOLEAN, "remove a partition that poprun has created"),
    Option(
        "numa-aware",
        BOOLEAN,
        "deprecated: use --process-placement",
        EXECUTION,
        deprecated="--process-placement spreadnuma, the default, gives each instance NUMA nodes of its own",
    ),
    Option(
        "torch-distributed-env",
        BOOLEAN,
        "deprecated: the variables of torch.distributed are always set",
        EXECUTION,
        deprecated="leave it out, because RANK, WORLD_SIZE, MASTER_ADDR and others are always set",
    ),
    Option("synchronise-poplar-sdk", BOOLEAN, "copy a Poplar SDK to the hosts", EXECUTION, without_effect=NO_SDK),
)
"""Options without effect, of the original or of earlier versions. They are accepted; no field holds their values."""

OPTIONS: tuple[Option, ...] = (*options_of(LaunchOptions), *ACCEPTED)
"""The options of poprun; `--help` shows the options of each section in this order."""
