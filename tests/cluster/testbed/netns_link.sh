#!/bin/bash
# Shapes, cuts or restores the links of hosts that netns_up.sh has made.
#
#   netns_link.sh h1|all delay=1ms rate=200mbit loss=0.1   # loss in percent; the others are unlimited
#   netns_link.sh h1|all clear | down | up | mode
#
# Delay and loss apply to packets that a host sends, the rate to both directions. tc netem does it if the kernel has it
# (not with WIRE=1). Otherwise tc tbf limits the rate, and wire.py, in place of the bridge, delays and drops packets.
# `down` keeps eth0 up in the host and takes the other end down, like a pulled cable.
set -u
here=$(cd -- "$(dirname -- "$0")" && pwd -P)
D=${D:-${TMPDIR:-/tmp}/testbed/hosts} PFX=h N=0 BED=bed
# shellcheck source=/dev/null
. "$D/env" || exit 1
[ $# -ge 2 ] || {
    echo "usage: netns_link.sh HOST|all clear|down|up|mode|key=value..." >&2
    exit 2
}
who=$1
shift
hosts=("$who")
if [ "$who" = all ]; then
    hosts=()
    for ((i = 0; i < N; i++)); do hosts+=("$PFX$i"); done
fi

switch() {
    ip netns exec "$BED-switch" "$@"
}

inside() {
    local h=$1
    shift
    ip netns exec "$BED-$h" "$@"
}

have_netem() {
    local status
    [ -z "${WIRE:-}" ] || return 1
    switch ip link add dev _p type veth peer name _q 2>/dev/null
    switch tc qdisc add dev _p root netem delay 1ms 2>/dev/null
    status=$?
    switch ip link del _p
    return $status
}

seconds() {
    awk -v text="$1" 'BEGIN { v = text + 0; if (text ~ /us$/) v /= 1e6; else if (text ~ /ms$/) v /= 1e3; print v }'
}

wire_runs() {
    [ -s "$D/run/wire.pid" ] && grep -qs wire.py "/proc/$(cat "$D/run/wire.pid")/cmdline"
}

# set_wire HOST KEY=VALUE...: note the values; start wire.py in place of the bridge, or let it read them again
set_wire() {
    local ends=() h
    python3 - "$D/run/wire.json" "v$1" "${@:2}" <<'END'
import json, os, sys
path, end, values = sys.argv[1], sys.argv[2], dict(word.split("=") for word in sys.argv[3:])
known = json.load(open(path)) if os.path.exists(path) else {}
known[end] = {**known.get(end, {}), **{name: float(value) for name, value in values.items()}}
with open(path + "~", "w") as file:
    json.dump(known, file)
os.replace(path + "~", path)
END
    if wire_runs; then
        kill -HUP "$(cat "$D/run/wire.pid")"
        return
    fi
    for ((i = 0; i < N; i++)); do
        h=$PFX$i
        switch ip link set "v$h" nomaster
        switch ip link set "v$h" arp off
        ends+=("v$h")
    done
    setsid ip netns exec "$BED-switch" python3 "$here/wire.py" "$D/run/wire.json" "${ends[@]}" \
        >"$D/log/wire" 2>&1 </dev/null &
    echo $! >"$D/run/wire.pid"
    for _ in $(seq 200); do
        grep -qs ready "$D/log/wire" && return
        sleep 0.05
    done
    cat "$D/log/wire" >&2
    exit 1
}

clear_link() {
    switch tc qdisc del dev "v$1" root 2>/dev/null
    inside "$1" tc qdisc del dev eth0 root 2>/dev/null
    switch ip link set "v$1" up
    if wire_runs; then
        kill "$(cat "$D/run/wire.pid")" # all hosts return to the bridge
        rm -f "$D/run/wire.pid" "$D/run/wire.json"
    fi
    for ((i = 0; i < N; i++)); do
        switch ip link set "v$PFX$i" arp on
        switch ip link set "v$PFX$i" master br0
    done
}

# The burst takes at least one aggregated frame of 64 KiB; the queue holds 50 ms, then packets are dropped.
limit_rate() {
    "$@" root tbf rate "$rate" burst 128kb latency 50ms
}

shape_link() {
    local h=$1 delay='' rate='' loss='' word
    shift
    for word in "$@"; do
        case $word in
        delay=* | rate=* | loss=*) declare "$word" ;;
        *)
            echo "unknown word $word; known: delay=, rate=, loss=, clear, down, up, mode" >&2
            exit 2
            ;;
        esac
    done
    if have_netem; then
        inside "$h" tc qdisc replace dev eth0 root netem limit 100000 \
            ${delay:+delay "$delay"} ${loss:+loss "$loss%"} ${rate:+rate "$rate"} || exit 1
        if [ -n "$rate" ]; then
            switch tc qdisc replace dev "v$h" root netem limit 100000 rate "$rate" || exit 1
        fi
        return
    fi
    inside "$h" tc qdisc del dev eth0 root 2>/dev/null
    switch tc qdisc del dev "v$h" root 2>/dev/null
    if [ -n "$rate" ]; then
        limit_rate inside "$h" tc qdisc add dev eth0 || exit 1
        limit_rate switch tc qdisc add dev "v$h" || exit 1
    fi
    if [ -n "$delay$loss" ] || wire_runs; then
        set_wire "$h" "delay=$(seconds "${delay:-0}")" "loss=$(awk -v percent="${loss:-0}" 'BEGIN { print percent / 100 }')"
    fi
}

for h in "${hosts[@]}"; do
    case $1 in
    down | up) switch ip link set "v$h" "$1" || exit 1 ;;
    mode)
        if have_netem; then echo netem; else echo tbf+wire; fi
        exit
        ;;
    clear) clear_link "$h" ;;
    *) shape_link "$h" "$@" ;;
    esac
done
