#!/bin/bash
# Undoes netns_up.sh: ends every process of the hosts (a pid namespace ends with its process 1), and removes the
# namespaces and the state. Idempotent. KEEP=1 keeps logs and keys.
set -u
D=${D:-${TMPDIR:-/tmp}/testbed/hosts} PFX=h BED=${BED:-bed}
if [ "$(id -u)" != 0 ]; then
    echo "SKIP: needs root" >&2
    exit 77
fi
# shellcheck source=/dev/null
[ -e "$D/env" ] && . "$D/env"

# is PID WORD: whether the process is still the one that we started
is() {
    grep -qs -- "$2" "/proc/$1/cmdline"
}

end() {
    local pid
    [ -s "$1" ] || return
    pid=$(cat "$1")
    is "$pid" "$2" && kill -KILL "$pid"
    for _ in $(seq 200); do
        is "$pid" "$2" || return
        sleep 0.02
    done
}

end "$D/run/wire.pid" wire.py
for file in "$D/run/$PFX"[0-9]*.pid; do end "$file" "$D/etc/init_"; done
for name in $(ip netns list | cut -d' ' -f1); do
    case $name in "$BED-"*) ip netns del "$name" ;; esac
done
if [ -n "${KEEP:-}" ]; then rm -rf "$D/run"; else rm -rf "$D"; fi
exit 0
