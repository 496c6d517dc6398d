"""Jobs on the hosts that a scheduler's variables name, with ssh between them: Grid Engine and SkyPilot."""

from __future__ import annotations

import pytest
from beds import Bed
from looping import POPRUN, own_lines

pytestmark = [pytest.mark.cluster, pytest.mark.complete, pytest.mark.timeout(170)]

JOB = [*POPRUN, "--num-instances", "2", "--num-replicas", "2", "hostname"]
SGE = {"SGE_ROOT": "/var/lib/gridengine", "ARC": "lx-amd64", "JOB_ID": "42", "NSLOTS": "2"}
"""With these variables and PE_HOSTFILE, Open MPI's daemons are started by qrsh unless poprun says otherwise."""


def reserved(bed: Bed, system: str) -> dict[str, str]:
    """Return the variables of a job on h0 and h1."""
    listed = [line.split() for line in (bed.shared / "state" / "etc" / "hosts").read_text().splitlines()]
    addresses = [words[0] for words in listed if words[-1] in ("h0", "h1")]
    if system == "skypilot":
        return {"SKYPILOT_NODE_IPS": "\n".join(addresses), "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "2"}
    file = bed.shared / "pe_hostfile"
    file.write_text("h0 1 all.q@h0 UNDEFINED\nh1 1 all.q@h1 UNDEFINED\n")
    return {**SGE, "PE_HOSTFILE": str(file)}


@pytest.mark.parametrize("system", ["grid-engine", "skypilot"])
def test_a_job_runs_on_the_hosts_of_the_variables(hosts: Bed, system: str) -> None:
    done = hosts.on("h0", *JOB, limit_s=120.0, **reserved(hosts, system))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[1,0]<stdout>:h0", "[1,1]<stdout>:h1"]


def test_a_second_node_of_skypilot_starts_nothing(hosts: Bed) -> None:
    done = hosts.on("h1", *JOB, limit_s=120.0, **reserved(hosts, "skypilot") | {"SKYPILOT_NODE_RANK": "1"})
    [said] = own_lines(done.stderr)
    assert said.startswith("SkyPilot runs its commands on every node, and this is not the first")
    assert (done.returncode, done.stdout) == (2, "")
