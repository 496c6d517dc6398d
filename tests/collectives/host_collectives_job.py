"""One instance of an MPI job that uses the collectives on values: `host_collectives_job.py REPORT`.

The report has one line of JSON per check: its name, and its failures by instance.
"""

from __future__ import annotations

import json
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import popdist
from collectives import LayoutMismatchError

DTYPES = ("float16", "float32", "int8", "int16", "int32", "int64")
MISMATCH = "Tensor layouts did not match on all instances"
CROSSING = "Named collectives wait for each other"
NAMES = (None, "tensor")

Check = Callable[[int, int], None]  # called with the number of instances and this one's index


def checks() -> Iterator[tuple[str, Check]]:
    """Yield every check with its name."""
    for dtype in DTYPES:
        for name in NAMES:
            named = f"{dtype}, {'named' if name else 'in order'}"
            yield f"allgather [{named}]", lambda n, i, d=dtype, name=name: check_allgather(n, i, d, name)
            yield f"allreduce sum [{named}]", lambda n, i, d=dtype, name=name: check_sum(n, i, d, name)
            yield f"allreduce mean [{named}]", lambda n, i, d=dtype, name=name: check_mean(n, i, d, name)
            yield f"broadcast [{named}]", lambda n, i, d=dtype, name=name: check_broadcast(n, i, d, name)
    yield "allgather in different orders", check_different_orders
    for collective in ("allgather", "allreduce", "broadcast"):
        for name in NAMES:
            named = f"{collective}, {'named' if name else 'in order'}"
            call = getattr(popdist, collective)
            yield f"different dtypes [{named}]", lambda _, i, c=call, name=name: check_dtypes(i, c, name)
            yield f"different shapes [{named}]", lambda _, i, c=call, name=name: check_shapes(i, c, name)
    yield "different orders in one thread", check_crossing
    yield "different orders in threads, of which one comes late", check_late_thread
    yield "broadcast from the last instance", check_broadcast_from_the_last
    yield "minimum and maximum", check_minimum_and_maximum
    yield "bool is broadcast", check_bool
    yield "the value is not changed", check_value_is_not_changed
    yield "on the communicator itself", check_communicator


def check_allgather(instances: int, index: int, dtype: str, name: str | None) -> None:
    gathered = popdist.allgather(np.array(index, dtype), tensor_name=name)
    assert gathered.dtype == dtype
    assert gathered.tolist() == list(range(instances))


def check_sum(instances: int, index: int, dtype: str, name: str | None) -> None:
    total = popdist.allreduce(np.array(index, dtype), "SUM", tensor_name=name)
    assert (total.dtype, total.shape) == (dtype, ())
    assert total == sum(range(instances))


def check_mean(instances: int, index: int, dtype: str, name: str | None) -> None:
    mean = popdist.allreduce(np.array(index, dtype), "MEAN", tensor_name=name)
    assert mean.dtype == dtype
    assert mean == np.array(sum(range(instances)) / instances).astype(dtype)  # 0 for integers


def check_broadcast(instances: int, index: int, dtype: str, name: str | None) -> None:
    sent = popdist.broadcast(np.array(42 if index == 0 else 0, dtype), tensor_name=name)
    assert sent.dtype == dtype
    assert sent == 42


def check_different_orders(instances: int, index: int) -> None:
    values = {"x": np.array(index), "y": np.array([index, index])}
    order = ("x", "y") if index % 2 == 0 else ("y", "x")
    with ThreadPoolExecutor(2) as pool:
        gathered = {name: pool.submit(popdist.allgather, values[name], name) for name in order}
    assert gathered["x"].result().tolist() == list(range(instances))
    assert gathered["y"].result().tolist() == [[number, number] for number in range(instances)]


def check_crossing(instances: int, index: int) -> None:
    """Check two names in opposite orders, which would deadlock: both fail on all instances and are usable again."""
    texts = []
    for name in ("x", "y") if index % 2 == 0 else ("y", "x"):
        with pytest.raises(LayoutMismatchError, match=CROSSING) as caught:
            popdist.allgather(index, name)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    assert all(fact in texts[0] for fact in ("in all_gather 'x' (", "rank 1 waits in all_gather 'y' (")), texts[0]
    for name in ("x", "y"):
        assert popdist.allgather(index, name).tolist() == list(range(instances))
    popdist.synchronize()


def check_late_thread(instances: int, index: int) -> None:
    """Check that a second thread may start the collective that ends the wait of the first one."""
    order = ("x", "y") if index % 2 == 0 else ("y", "x")
    gathered = {}

    def gather_second() -> None:
        for _ in range(20):
            popdist.synchronize()
        gathered[order[1]] = popdist.allgather(index, order[1])

    thread = threading.Thread(target=gather_second)
    thread.start()
    gathered[order[0]] = popdist.allgather(index, order[0])
    thread.join()
    assert gathered["x"].tolist() == gathered["y"].tolist() == list(range(instances))


def check_dtypes(index: int, collective: Callable[..., np.ndarray], name: str | None) -> None:
    with pytest.raises(LayoutMismatchError, match=MISMATCH):
        collective(np.array(1, "float32" if index % 2 == 0 else "int32"), tensor_name=name)


def check_shapes(index: int, collective: Callable[..., np.ndarray], name: str | None) -> None:
    with pytest.raises(LayoutMismatchError, match=MISMATCH):
        collective(np.ones(() if index % 2 == 0 else (1, 1)), tensor_name=name)


def check_broadcast_from_the_last(instances: int, index: int) -> None:
    assert popdist.broadcast(index, root_rank=instances - 1) == instances - 1


def check_minimum_and_maximum(instances: int, index: int) -> None:
    assert popdist.allreduce(index, "MIN") == 0
    assert popdist.allreduce(index, "MAX") == instances - 1


def check_bool(instances: int, index: int) -> None:
    sent = popdist.broadcast(np.array([index == 0, index != 0]))
    assert sent.tolist() == [True, False]


def check_value_is_not_changed(instances: int, index: int) -> None:
    value = np.full(5, index, np.float32)
    popdist.allreduce(value)
    popdist.broadcast(value, root_rank=instances - 1)
    assert (value == index).all()


def check_communicator(instances: int, index: int) -> None:
    communicator = popdist.communicator()
    assert (communicator.rank, communicator.size) == (index, instances)
    assert communicator.all_gather(np.array(index)).tolist() == list(range(instances))
    assert communicator.all_reduce(np.array([index])).tolist() == [sum(range(instances))]
    handles = {
        name: communicator.start_all_gather(np.array(value), name=name)
        for name, value in ([("x", index), ("y", -index)] if index % 2 == 0 else [("y", -index), ("x", index)])
    }
    assert handles["x"].wait().tolist() == list(range(instances))
    assert handles["y"].wait().tolist() == [-number for number in range(instances)]


def failure_of(check: Check, instances: int, index: int) -> str:
    try:
        check(instances, index)
    except BaseException:
        return traceback.format_exc()
    return ""


def main(report: Path) -> None:
    warnings.simplefilter("error")
    popdist.init()
    from mpi4py import MPI

    verdicts = MPI.COMM_WORLD.Dup()
    for name, check in checks():
        failures = verdicts.allgather(failure_of(check, popdist.getNumInstances(), popdist.getInstanceIndex()))
        if popdist.getInstanceIndex() == 0:
            with report.open("a") as file:
                file.write(json.dumps([name, failures]) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
