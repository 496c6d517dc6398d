#!/bin/bash
# Ends the daemons that slurm_up.sh has started, by their pid files, and removes its state. Idempotent.
# KEEP=1 keeps the state with the logs.
set -u
S=${S:-${TMPDIR:-/tmp}/testbed/slurm} MODE=local N=0 PFX=h
[ -e "$S/env" ] || exit 0
if [ "$(id -u)" != 0 ]; then
    echo "SKIP: needs root" >&2
    exit 77
fi
# shellcheck source=/dev/null
. "$S/env"
export SLURM_CONF=$S/slurm.conf

on() {
    local h=$1
    shift
    if [ "$MODE" != hosts ]; then
        "$@"
    elif [ -x "$D/on" ]; then
        "$D/on" "$h" "$@"
    fi
}

# end HOST SIGNAL NAME: signal the daemon NAME if the process in its pid file is still the daemon
end() {
    # shellcheck disable=SC2016 # for the other shell
    on "$1" bash -c '[ -s "$1" ] && pid=$(cat "$1") && grep -qs "$2" "/proc/$pid/cmdline" && kill "-$3" "$pid"' \
        end "$S/run/$3.pid" "${3%%.*}" "$2" 2>/dev/null
}

on "${PFX}0" timeout 10 scancel --state=RUNNING,PENDING,SUSPENDED -u root 2>/dev/null
for signal in TERM KILL; do
    for ((i = 0; i < N; i++)); do end "$PFX$i" "$signal" "slurmd.$PFX$i"; done
    end "${PFX}0" "$signal" slurmctld
    sleep 0.5
done
# End steps that outlived their slurmd: their environment names our configuration.
for process in /proc/[0-9]*; do
    if grep -qs '^slurmstepd' "$process/cmdline" && grep -szqxF "SLURM_CONF=$SLURM_CONF" "$process/environ"; then
        kill -KILL "${process#/proc/}"
    fi
done
end "${PFX}0" TERM munged
sleep 0.2
[ -n "${KEEP:-}" ] || rm -rf "$S"
exit 0
