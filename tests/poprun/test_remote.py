"""The options of mpirun and ssh for jobs on several hosts."""

import socket
from dataclasses import replace

import pytest

from poprun.errors import UsageError
from poprun.hosts.remote import Remote, forwarded_names, mpirun_options, need_domains, ssh_options
from poprun.ipc.sockets import keep_alive, probing_times

REMOTE = Remote("10.0.0.0/24", "10.0.0.1", ("-F", "my config"), 10)


def pairs(words):
    assert len(words) % 3 == 0
    return {words[at + 1]: (words[at], words[at + 2]) for at in range(0, len(words), 3)}


def test_daemons_and_data_use_one_network():
    options = pairs(mpirun_options(REMOTE, ()))
    assert options["prte_if_include"] == ("--prtemca", "10.0.0.0/24")
    assert options["btl_tcp_if_include"] == ("--mca", "10.0.0.0/24")
    assert options["plm_ssh_args"] == ("--prtemca", "-F 'my config'")


def test_a_daemon_gives_a_silent_host_three_seconds_more_than_poprun():
    for silence_s in (1, 2, 3, 4.5, 10, 60, 179.2):
        options = pairs(mpirun_options(Remote("", "", (), silence_s), ()))
        names = ("time", "intvl", "probes")
        first, interval, probes = (int(options[f"oob_tcp_keepalive_{name}"][1]) for name in names)
        assert first >= 1
        soonest_s = interval * probes  # for a host that answered just before it fell silent
        assert silence_s + 3 <= soonest_s <= silence_s + 3 + interval


def test_the_kernel_accepts_every_keepalive_limit():
    for silence_s in (1, 10, 190, 191, 3600, 86400, 10**7):
        with socket.socket() as connection:
            keep_alive(connection, silence_s)
            first_s, interval_s, probes = probing_times(silence_s)
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == probes
        if 1 < silence_s <= 32767:
            assert silence_s <= first_s + interval_s * probes <= silence_s + interval_s


def test_parameters_of_the_user_are_kept():
    options = pairs(mpirun_options(REMOTE, ("--mca", "btl_tcp_if_include", "eth7")))
    assert "btl_tcp_if_include" not in options
    assert "prte_if_include" in options


def test_a_dry_run_without_a_known_network_names_none():
    assert "prte_if_include" not in pairs(mpirun_options(Remote("", "", (), 10), ()))


def test_the_user_s_ssh_options_come_first():
    assert ssh_options({"POPRUN_SSH_ARGS": "-p 22 -o BatchMode=no"})[:4] == ("-p", "22", "-o", "BatchMode=no")
    assert "BatchMode=yes" in ssh_options({})


@pytest.mark.parametrize(
    ("names", "first"),
    [
        (["OMPI_MCA_plm_rsh_args"], ["-o", "OMPI_MCA_plm_rsh_args"]),
        (["OMPI_MCA_plm_rsh_args", "PRTE_MCA_plm_ssh_args"], ["-o", "PRTE_MCA_plm_ssh_args"]),
        (["OMPI_MCA_plm_ssh_args", "POPRUN_SSH_ARGS"], ["-o", "POPRUN_SSH_ARGS", "-o", "OMPI_MCA_plm_ssh_args"]),
    ],
)
def test_open_mpi_s_variable_of_ssh_options_counts_too(names, first):
    options = ssh_options({name: f"-o {name}" for name in names})
    assert list(options) == [*first, *ssh_options({})]


def test_ssh_options_with_an_open_quote_are_refused_with_their_variable():
    with pytest.raises(UsageError, match="^PRTE_MCA_plm_ssh_args cannot be split into words"):
        ssh_options({"PRTE_MCA_plm_ssh_args": "-o 'x"})


def test_variables_that_shape_results_are_forwarded_and_machine_specific_ones_are_not():
    environ = (
        "XLA_FLAGS",
        "HOME",
        "POPDIST_TIMEOUT_S",
        "CUDA_VISIBLE_DEVICES",
        "VIRTUAL_ENV",
        "SSH_AUTH_SOCK",
        "DISPLAY",
    )
    assert forwarded_names(environ) == ("POPDIST_TIMEOUT_S", "VIRTUAL_ENV", "XLA_FLAGS")


def test_open_mpi_compares_full_names_only_if_two_hosts_agree_up_to_the_first_dot():
    assert need_domains([["n1.east"], ["n1.west"]])
    assert need_domains([["a", "n1.east"], ["b", "N1.west"]])
    assert need_domains([["n1.west"], ["n1"]])
    assert not need_domains([["n1.east", "n1"], ["n2.east", "n2.east"]])
    assert not need_domains([["10.0.0.1"], ["10.0.0.2"]])
    names = ("prte_keep_fqdn_hostnames", "pmix_keep_fqdn_hostnames")
    options = pairs(mpirun_options(replace(REMOTE, keeps_domains=True), ()))
    assert [options[name] for name in names] == [("--prtemca", "1"), ("--pmixmca", "1")]
    assert not set(names) & pairs(mpirun_options(REMOTE, ())).keys()
