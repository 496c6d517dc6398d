"""`popdist.launch`: a function as a job of poprun, from a notebook, a script or a test."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar, cast

from popdist.environments.detection import detect_instance
from popdist.errors import LaunchError, LifeCycleError
from popdist.launching.reception import FunctionReception
from popdist.launching.relay import OutputRelay
from popdist.launching.reports import InstanceFailure, cause_of, results_of
from popdist.launching.travelling import name_of, pack_call
from popdist.membership.process import process
from popdist.spawned import leave_job
from popdist.xla import without_own_setting

_Result = TypeVar("_Result")

_LAUNCHERS = ("poprun", "mpirun")
_OURS = str(Path(__file__).parents[1])


def launch(
    function: Callable[..., _Result],
    *args: object,
    num_instances: int = 1,
    num_replicas: int | None = None,
    hosts: str | Sequence[str] = (),
    options: Sequence[str] = (),
) -> list[_Result]:
    """Run `function(*args)` on every instance of a new job, which poprun starts, and wait for its end.

    The function and its arguments travel to the instances by cloudpickle (`pip install cloudpickle`), over a socket; no
    file is written. Each instance is a new process: it has its own copies of everything that the function refers to,
    and it imports modules anew. The job's output appears in `sys.stdout` and `sys.stderr` while it runs.

    Args:
        function: Function to run. It may come from the main program, such as a cell of a notebook.
        *args: Its arguments, the same for all instances.
        num_instances: Number of instances.
        num_replicas: Total number of replicas. Default: one per instance.
        hosts: Hosts to run on, as `--host` names them, or a list of them. Default: as poprun chooses.
        options: Further options of poprun, one word each, such as `["--timeline", "run.json"]`.

    Returns:
        The results of all instances, by their index. Instances that were lost, and spares that were not needed, have
        none.

    Raises:
        Exception: An exception of the function, of any type. Its cause shows the traceback in the instance.
        LaunchError: The job cannot be started, or an instance ended without a result or an exception. Also if the
            function ended with another exception, such as SystemExit or KeyboardInterrupt, which the message names.
        LifeCycleError: This process is an instance of a job.
        TypeError: The function, or an object that it refers to, cannot be pickled.
        KeyboardInterrupt: The user interrupted this process. The job has ended.

    Example:
        >>> import popdist
        >>> popdist.launch(popdist.getNumTotalReplicas, num_instances=2, num_replicas=4)  # doctest: +SKIP
        [4, 4]
    """
    if not callable(function):
        raise TypeError(f"launch was called with {function!r}; give a function, and its arguments after it")
    environ = job_environment(os.environ)
    words = poprun_words(num_instances, num_replicas, hosts, options)
    with FunctionReception(pack_call(function, args)) as reception:
        command = [*_python("poprun.__main__"), *words, *_python("popdist.launched")]
        relay = OutputRelay(command, {**environ, **reception.variables})
        try:
            status = relay.run()
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"the job of {name_of(function)} was ended") from None
        reports = reception.last_reports()
    if status == 0:
        for report in reports:
            if isinstance(report, InstanceFailure):  # the job went on without the instance, or was restarted
                print(f"{report.sender} failed, and the job went on:\n{report.trace}", file=sys.stderr)
        return cast("list[_Result]", results_of(reports, status))
    error = cause_of(reports, status)
    if error is None:
        raise LaunchError(
            f"the job of {name_of(function)} has ended with status {status}, without an exception of the function's "
            f"own; its last messages:\n{relay.last_lines}",
            status,
        )
    raise error


def job_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for poprun: that of this process, without settings that our libraries made in it.

    Raises:
        LifeCycleError: This process is an instance of a job, or was started by one.
    """
    own = without_own_setting(environ)
    for here in filter(None, (process.instance, detect_instance(own))):
        if here.launcher in _LAUNCHERS or here.count > 1:
            raise LifeCycleError(
                f"popdist.launch was called inside a job: this process belongs to instance {here.index} of "
                f"{here.count}, started by {here.launcher}. Call it in a process outside of all jobs, or set "
                "POPDIST_ALONE=1 in the environment of a child process that launches a job of its own"
            )
    leave_job(own)
    return own


def poprun_words(
    num_instances: int, num_replicas: int | None, hosts: str | Sequence[str], options: Sequence[str]
) -> list[str]:
    """Return the options for poprun.

    Raises:
        TypeError: An argument has the wrong type.
    """
    if isinstance(options, str):
        raise TypeError(f"options is the text {options!r}; give a list of words, such as {options.split()!r}")
    numbers = {"num_instances": num_instances, "num_replicas": num_replicas}
    words = []
    for name, number in numbers.items():
        if number is None:
            continue
        if isinstance(number, bool) or not hasattr(number, "__index__"):
            raise TypeError(f"{name} is {number!r}; give a whole number")
        words += [f"--{name.replace('_', '-')}", str(number.__index__())]
    if hosts:
        words += ["--host", hosts if isinstance(hosts, str) else ",".join(hosts)]
    return [*words, *map(str, options)]


def _python(module: str) -> list[str]:
    """Return the words that run a module's `main`, wherever this process has found our packages.

    `-P` keeps the working directory's files from hiding modules. The function's module may still be found there.
    """
    code = f"import sys; sys.path.append({_OURS!r}); from {module} import main; sys.exit(main())"
    return [sys.executable, "-P", "-c", code]
