"""The options of poprun. A new option is one new field here."""

from __future__ import annotations

from dataclasses import dataclass

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

_MOST = 1_000_000
"""The largest number of things that are counted one by one: more is a slip of the keyboard."""

FLAG, BOOLEAN, NUMBER, SECONDS = OptionKind.FLAG, OptionKind.BOOLEAN, OptionKind.NUMBER, OptionKind.SECONDS
TEXT, PATH, HOSTS, ARGUMENTS = OptionKind.TEXT, OptionKind.PATH, OptionKind.HOSTS, OptionKind.ARGUMENTS


@dataclass(frozen=True)
class LaunchOptions:
    """The options of poprun, each with its value for one launch.

    Attributes:
        program: the program and its arguments.
        metrics_run: a name of this job that no other job has, for services; a job that is restarted keeps it.
    """

    program: tuple[str, ...]
    help: bool = option(
        False, FLAG, "print the options that most jobs need and stop", GENERIC, "-h", concerns_one_call=True
    )
    help_all: bool = option(False, FLAG, "print all options and stop", GENERIC, concerns_one_call=True)
    version: bool = option(False, FLAG, "print the version and stop", GENERIC, concerns_one_call=True)
    version_format: str = option(
        "text",
        TEXT,
        "how --version prints; the full forms list every dependency",
        GENERIC,
        choices=("text", "json", "full-text", "full-json"),
        is_rare=True,
        concerns_one_call=True,
    )
    import_config: str | None = option(
        None,
        PATH,
        "read options from a TOML file; the command line wins",
        GENERIC,
        concerns_one_call=True,
        see="#configuration-files",
    )
    export_config: str | None = option(
        None, PATH, "write the options in force to a TOML file", GENERIC, concerns_one_call=True
    )
    overwrite_config: bool = option(
        False, BOOLEAN, "let --export-config replace a file", GENERIC, is_rare=True, concerns_one_call=True
    )
    verbose: bool = option(False, FLAG, "say what happens", GENERIC, "-v")
    vv: bool = option(False, FLAG, "say how it happens, and show the topology", GENERIC, "-vv")
    dry_run: bool = option(
        False,
        FLAG,
        "print topology, placement and the mpirun command, run nothing",
        GENERIC,
        concerns_one_call=True,
        see="#dry-runs",
    )
    json: bool = option(
        False, FLAG, "with --dry-run: print all of it as JSON", GENERIC, is_rare=True, concerns_one_call=True
    )
    host: tuple[str, ...] = option(
        (), HOSTS, "hosts that run instances, e.g. 'node[0-2,4]'; default this machine", TOPOLOGY, "-H", see="#hosts"
    )
    hostfile: str | None = option(
        None, PATH, "a file of hosts, `name slots=N` on each line; excludes --host", TOPOLOGY, see="#hosts"
    )
    host_subnet: str | None = option(
        None,
        TEXT,
        "the interface or network that hosts use, e.g. eth0 or 10.0.0.0/16",
        TOPOLOGY,
        without_effect=ONE_HOST,
    )
    num_replicas: int = option(
        1,
        NUMBER,
        "replicas of all instances together",
        TOPOLOGY,
        shown="one for each instance",
        at_most=_MOST,
    )
    num_instances: int = option(
        1,
        NUMBER,
        "processes on all hosts together; replicas are divided evenly",
        TOPOLOGY,
        *("-n", "-np", "--np"),
        at_most=_MOST,
    )
    ipus_per_replica: int = option(
        1, NUMBER, "devices that one replica spans", TOPOLOGY, at_most=_MOST, is_rare=True, see="#partitions"
    )
    num_ilds: int | None = option(
        None, NUMBER, "IPU-Link domains; instances are divided evenly", TOPOLOGY, is_rare=True, see="#partitions"
    )
    sync_type: str | None = option(
        None,
        TEXT,
        "how a partition synchronises, e.g. ST_POD_NATIVE_DEFAULT",
        TOPOLOGY,
        is_rare=True,
        without_effect=NO_SERVER,
    )
    print_topology: bool = option(False, BOOLEAN, "show which instance drives which replicas", TOPOLOGY)
    vipu_server_host: str = option(
        "localhost", TEXT, "host of the V-IPU server", VIPU, is_rare=True, without_effect=NO_SERVER
    )
    vipu_server_port: int = option(
        8090, NUMBER, "its port", VIPU, at_most=65535, is_rare=True, without_effect=NO_SERVER
    )
    vipu_server_timeout: int = option(
        120, NUMBER, "seconds that a request may take", VIPU, is_rare=True, without_effect=NO_SERVER
    )
    vipu_partition: str | None = option(
        None,
        TEXT,
        "a simulated partition: a name, or a device map FILE.toml",
        VIPU,
        is_rare=True,
        without_effect=OFFLINE,
        see="#partitions",
    )
    vipu_partition_attempts: int = option(
        1, NUMBER, "tries at binding to the partition", VIPU, is_rare=True, without_effect=NO_SERVER
    )
    vipu_cluster: str | None = option(
        None,
        TEXT,
        "deprecated: see --vipu-allocation",
        VIPU,
        is_rare=True,
        without_effect=NO_SERVER,
        deprecated="--vipu-allocation has replaced it",
    )
    vipu_allocation: str | None = option(
        None, TEXT, "where a partition is created", VIPU, is_rare=True, without_effect=NO_SERVER
    )
    update_partition: bool = option(
        False,
        BOOLEAN,
        "change the partition if it does not fit",
        VIPU,
        is_rare=True,
        without_effect=NO_PARTITION,
        see="#partitions",
    )
    reset_partition: bool | None = option(
        None, BOOLEAN, "reset the partition before the run", VIPU, is_rare=True, without_effect=NO_SERVER
    )
    remove_partition: bool = option(
        True, BOOLEAN, "remove a partition that poprun has created", VIPU, is_rare=True, without_effect=NO_SERVER
    )
    executable_cache_path: str | None = option(
        None, PATH, "directory of compiled executables, for the programs", EXECUTION, see="compilation.md"
    )
    mpi_global_args: tuple[str, ...] = option(
        (), ARGUMENTS, "options for mpirun, given once at the front; adds up", EXECUTION
    )
    mpi_local_args: tuple[str, ...] = option(
        (), ARGUMENTS, "options for mpirun, given for each instance; adds up", EXECUTION
    )
    instance_mpi_local_args: tuple[tuple[int, tuple[str, ...]], ...] = option(
        (),
        OptionKind.INSTANCE_ARGUMENTS,
        "options for mpirun, given for one instance; adds up",
        EXECUTION,
        is_rare=True,
    )
    allow_run_as_root: bool = option(False, BOOLEAN, "let mpirun run as root", EXECUTION)
    process_placement: str = option(
        "spreadnuma",
        TEXT,
        "spreadnuma: each instance on cores of its own; cores, sockets: one for each in turn; disabled: anywhere",
        EXECUTION,
        choices=("spreadnuma", "disabled", "cores", "sockets"),
        see="#pinning",
    )
    numa_aware: bool | None = option(
        None,
        BOOLEAN,
        "deprecated: see --process-placement",
        EXECUTION,
        is_rare=True,
        deprecated="--process-placement spreadnuma, the default, gives each instance NUMA nodes of its own",
    )
    torch_distributed_env: bool = option(
        False,
        BOOLEAN,
        "set RANK, WORLD_SIZE, MASTER_ADDR and others, by which torch.distributed, accelerate, Lightning meet",
        EXECUTION,
        see="#other-libraries",
    )
    offline_mode: bool = option(False, BOOLEAN, "do not use accelerators, compute on the CPU", EXECUTION)
    synchronise_python_venv: bool = option(
        False,
        BOOLEAN,
        "copy the Python environment to the hosts",
        EXECUTION,
        without_effect=ONE_HOST,
        see="#preparing-hosts",
    )
    synchronise_poplar_sdk: bool = option(
        False, BOOLEAN, "would copy a Poplar SDK", EXECUTION, is_rare=True, without_effect=NO_SDK
    )
    distribute_ssh_key: bool = option(
        False,
        BOOLEAN,
        "install the ssh key on the hosts",
        EXECUTION,
        is_rare=True,
        without_effect=ONE_HOST,
        see="#preparing-hosts",
    )
    skip_checks: bool = option(
        False, FLAG, "do not examine the hosts before the launch", EXECUTION, without_effect=ONE_HOST
    )
    start_timeout_s: float = option(60, SECONDS, "until then every instance must have started", EXECUTION)
    host_timeout_s: float = option(
        10, SECONDS, "the silence after which a host is lost", EXECUTION, without_effect=ONE_HOST
    )
    on_failure: str = option(
        "stop",
        TEXT,
        "what happens when an instance fails: stop ends the job, shrink lets the others go on, restart starts it again",
        FAILURE,
        choices=("stop", "shrink", "restart"),
        see="#restarts",
    )
    max_restarts: int = option(
        3, NUMBER, "how often it is started again at most", FAILURE, at_least=0, without_effect=STOPS
    )
    restart_backoff_s: float = option(
        1,
        SECONDS,
        "the pause before the first restart; it doubles from one to the next",
        FAILURE,
        at_least=0,
        is_rare=True,
        without_effect=STOPS,
    )
    min_instances: int = option(
        1, NUMBER, "the fewest instances that go on or are started again", FAILURE, without_effect=STOPS
    )
    stuck_timeout_s: float = option(
        300,
        SECONDS,
        "after so long an instance that others wait for and that does nothing is a failure; 0: never",
        FAILURE,
        at_least=0,
    )
    inject: tuple[str, ...] = option(
        (),
        OptionKind.FAULT,
        "let something go wrong, e.g. kill:instance=1,step=7; adds up",
        FAILURE,
        see="#faults-on-purpose",
    )
    only_output_from_instance: int | None = option(
        None, NUMBER, "show the output of this instance only", OUTPUT, at_least=None, see="#output"
    )
    no_tags: bool = option(
        False,
        FLAG,
        "show lines without [1,N]<stdout>: in front; so does one instance where standard output is a pipe of its own",
        OUTPUT,
        see="#output",
    )
    tag_host: bool = option(False, FLAG, "show the host in front of each line too", OUTPUT)
    timestamps: bool = option(False, FLAG, "show the time in front of each line", OUTPUT)
    output_dir: str | None = option(
        None, PATH, "also write each instance's output to files in this directory", OUTPUT, see="#output"
    )
    metrics: tuple[str, ...] = option(
        (),
        OptionKind.METRICS,
        "write the metrics of every step there: csv:FILE, jsonl:FILE, tensorboard:FOLDER, prometheus:[HOST:]PORT, "
        "mlflow[:URI], wandb[:PROJECT]; adds up",
        OUTPUT,
        see="observability.md#metrics",
    )
    metrics_run: str = ""
    timeline: str | None = option(
        None,
        PATH,
        "record what instances do, and write it to this file, for Perfetto",
        OUTPUT,
        see="observability.md",
    )
    timeline_limit: int | None = option(
        None, NUMBER, "MB that one instance may record", OUTPUT, shown="256", at_most=_MOST, is_rare=True
    )
    profile: str | None = option(
        None,
        TEXT,
        "put what the profiler of jax or torch sees of five steps into the timeline; jax:20@100: of 20, after 100",
        OUTPUT,
        is_rare=True,
        see="observability.md",
    )
    summary: str = option(
        "",
        TEXT,
        "what is said when the job is over: yes, no (three lines, or none), or json:FILE",
        OUTPUT,
        shown="yes on a terminal",
        see="observability.md#after-a-run",
    )
    top_address: str | None = option(
        None,
        TEXT,
        "HOST:PORT where poprun top on other hosts may look at the job",
        OUTPUT,
        is_rare=True,
        see="observability.md#while-it-runs",
    )
    debug: bool = option(False, FLAG, "say everything: as -vv, and every setting in force", DEBUG, is_rare=True)


OPTIONS: tuple[Option, ...] = options_of(LaunchOptions)
"""The options of poprun, in the order of `--help`."""
