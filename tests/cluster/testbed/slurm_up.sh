#!/bin/bash
# Starts a real Slurm of N nodes on one machine, without systemd. Idempotent.
#
#   eval "$(D=... S=... bash slurm_up.sh)"     # sets SLURM_CONF
#
# MODE=hosts (default if netns_up.sh's hosts are up): a slurmd in each host, slurmctld in the first host; clients run
#   inside: $D/on h0 env SLURM_CONF=$SLURM_CONF srun ...
# MODE=local: N slurmd on loopback ports, with one host name and without namespaces.
#
# S               state, seen by all hosts (default ${TMPDIR:-/tmp}/testbed/slurm)
# D               state of netns_up.sh
# N=4 CPUS=2      number of nodes (MODE=local), and cores that each node claims
# BASE=11000      first port
# SLURMD_TIMEOUT=15
#
# Exit status: 0 up, 77 a requirement is missing here, 1 failed.
# Without libpmix-dev `srun --mpi=pmix` does not work: the plugin opens libpmix.so, a link that only this package has.
set -u
here=$(cd -- "$(dirname -- "$0")" && pwd -P)
S=${S:-${TMPDIR:-/tmp}/testbed/slurm} D=${D:-${TMPDIR:-/tmp}/testbed/hosts} CPUS=${CPUS:-2} BASE=${BASE:-11000}
SLURMD_TIMEOUT=${SLURMD_TIMEOUT:-15} PFX=h N=${N:-4} NET=10.77.0
export S D SLURM_CONF=$S/slurm.conf

main() {
    choose_mode
    check_means
    if [ -e "$SLURM_CONF" ] && all_idle; then
        echo "export SLURM_CONF=$SLURM_CONF"
        return
    fi
    [ -e "$S" ] && bash "$here/slurm_down.sh"
    mkdir -p "$S/log" "$S/run" "$S/ctld" || die "cannot make $S"
    chmod 755 "$S" "$S"/*
    start_munged
    write_configuration
    on "${PFX}0" slurmctld -f "$SLURM_CONF" || die slurmctld
    for ((i = 0; i < N; i++)); do start_node "$PFX$i"; done
    await_nodes
    echo "export SLURM_CONF=$SLURM_CONF"
}

skip() {
    echo "SKIP: $*" >&2
    exit 77
}

die() {
    echo "FAIL: $*" >&2
    tail -n 5 "$S"/log/* >&2
    exit 1
}

choose_mode() {
    if [ -z "${MODE:-}" ]; then
        MODE=local
        [ -e "$D/env" ] && MODE=hosts
    fi
    if [ "$MODE" = hosts ]; then
        # shellcheck source=/dev/null
        . "$D/env" || exit 1
    else
        PFX=n
    fi
}

check_means() {
    local tool
    [ "$(id -u)" = 0 ] || skip "Slurm's daemons need root"
    for tool in slurmctld slurmd munged srun; do
        command -v "$tool" >/dev/null || skip "no $tool (apt-get install slurm-wlm munge libpmix-dev)"
    done
}

on() {
    local h=$1
    shift
    if [ "$MODE" = hosts ]; then "$D/on" "$h" "$@"; else "$@"; fi
}

all_idle() {
    on "${PFX}0" env "SLURM_CONF=$SLURM_CONF" sinfo -h -r -t idle,alloc,mix -o %D 2>/dev/null | grep -qx "$N"
}

# One daemon for all hosts: its unix socket works across network namespaces on a shared file system. It ends with h0.
start_munged() {
    dd if=/dev/urandom of="$S/munge.key" bs=128 count=1 2>/dev/null
    chmod 600 "$S/munge.key"
    on "${PFX}0" munged --force --key-file="$S/munge.key" --socket="$S/run/munge.socket" --pid-file="$S/run/munged.pid" \
        --log-file="$S/log/munged" --seed-file="$S/run/munge.seed" 2>>"$S/log/munged.err" || die munged
}

nodes() {
    for ((i = 0; i < N; i++)); do
        if [ "$MODE" = hosts ]; then
            echo "NodeName=$PFX$i NodeAddr=$NET.$((10 + i)) CPUs=$CPUS RealMemory=1000 State=UNKNOWN"
        else
            echo "NodeName=n$i NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=$((BASE + 10 + i))" \
                "CPUs=$CPUS RealMemory=1000 State=UNKNOWN"
        fi
    done
}

write_configuration() {
    local controller
    controller="$(hostname)(127.0.0.1)"
    [ "$MODE" = hosts ] && controller="${PFX}0($NET.10)"
    cat >"$SLURM_CONF" <<END
ClusterName=sim
SlurmctldHost=$controller
SlurmctldPort=$BASE
SlurmdPort=$((BASE + 1))
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$S/run/munge.socket
CredType=cred/munge
StateSaveLocation=$S/ctld
SlurmdSpoolDir=$S/spool.%n
SlurmctldPidFile=$S/run/slurmctld.pid
SlurmdPidFile=$S/run/slurmd.%n.pid
SlurmctldLogFile=$S/log/slurmctld
SlurmdLogFile=$S/log/slurmd.%n
TmpFS=$S/tmp.%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout=$SLURMD_TIMEOUT
KillWait=10
MessageTimeout=5
BatchStartTimeout=5
MailProg=/bin/true
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1,sched_min_interval=0
$(nodes)
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
END
    echo "CgroupMountpoint=/sys/fs/cgroup" >"$S/cgroup.conf"
    for word in MODE N PFX D; do printf '%s=%q\n' "$word" "${!word}"; done >"$S/env"
}

start_node() {
    mkdir -p "$S/spool.$1" "$S/tmp.$1"
    chmod 1777 "$S/tmp.$1"
    on "$1" slurmd -N "$1" -f "$SLURM_CONF" || die "slurmd of $1"
}

await_nodes() {
    for _ in $(seq 150); do
        all_idle && return
        sleep 0.2
    done
    on "${PFX}0" env "SLURM_CONF=$SLURM_CONF" sinfo >&2
    die "not all nodes are idle after 30 s"
}

main
