"""What `poprun doctor` says of the sums of each host's jaxlib."""

from __future__ import annotations

import pytest
from recorded_hosts import VERSIONS, host

from poprun.doctor import check_sums
from poprun.hosts.host_checks import Finding


def says(jaxlib: str, **environ: str) -> Finding:
    (finding,) = check_sums({"h0": host(0, versions=VERSIONS | {"jaxlib": jaxlib})}, environ)
    return finding


@pytest.mark.parametrize(
    ("jaxlib", "fact"),
    [
        ("0.10.1", "jaxlib 0.10.1 adds up right"),
        ("0.11.0", "jaxlib 0.11.0 adds up wrongly by itself; strategies keep sums from YNNPACK"),
        ("0.13.0", "jaxlib 0.13.0 is newer than those that were looked at; strategies keep sums from YNNPACK"),
    ],
)
@pytest.mark.parametrize("environ", [{}, {"JAX_PLATFORMS": "cuda"}, {"XLA_FLAGS": "--xla_cpu_enable_fast_math=false"}])
def test_nothing_is_to_be_done_where_strategies_see_to_it(jaxlib, fact, environ):
    assert says(jaxlib, **environ) == Finding("sums", "h0", fact)


def test_flags_that_ask_for_wrong_sums_are_a_fault():
    finding = says("0.10.2", XLA_FLAGS="--xla_cpu_experimental_ynn_fusion_type=+reduce")
    assert finding.is_fault
    assert "XLA_FLAGS asks for it" in finding.fact
    assert finding.way_out.startswith("take reduce out of it")


def test_a_user_who_allows_wrong_sums_gets_a_hint():
    finding = says("0.10.2", POPDIST_ALLOW_WRONG_SUMS="1")
    assert finding.fact == "jaxlib 0.10.2 adds up wrongly on CPUs, and POPDIST_ALLOW_WRONG_SUMS is 1"
    assert (finding.way_out, finding.is_fault) == ("take that out of the environment", False)


def test_hosts_without_jaxlib_have_no_sums():
    assert list(check_sums({"h0": host(0, versions=VERSIONS | {"jaxlib": ""})}, {})) == []
