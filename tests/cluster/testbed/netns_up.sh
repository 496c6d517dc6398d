#!/bin/bash
# Makes several hosts on one machine: N hosts h0..h<N-1>. Each has its own network, mount, uts, ipc and pid namespace,
# its own sshd, /tmp, /dev/shm, /run, /etc/hosts, host name, machine id and boot id. All other files are shared.
#
#   D=/tmp/bed/state bash netns_up.sh       # idempotent; prints D
#   $D/on h1 COMMAND...                     # runs a command inside a host
#   ssh -F $D/ssh_config h1 COMMAND         # works inside every host
#
# D               state; all hosts see the folder that holds it (default ${TMPDIR:-/tmp}/testbed/hosts)
# BED=bed         prefix of the names of network namespaces; beds with different prefixes can run side by side
# N=4 PFX=h       number of hosts, and prefix of their names
# CALLED="n1.east n1.west"  the hosts' own names, by which others can reach them, too, besides h0, h1, ...
# NET=10.77.0     /24 network; host i has the address $NET.<10+i>
# FAMILY=4        6: hosts have only IPv6 addresses, fd77::<10+i>
# PORT=2222 SSH_USER=root
# SHARE=A:B       folders below /tmp that all hosts see
# OVERLAY=DIR     DIR/usr, DIR/etc and DIR/home are laid over /usr, /etc and /home inside the hosts (packages unpacked by dpkg -x)
# LINK=...        initial shape of all links, in the form of netns_link.sh
# LIFELINE=FD     a descriptor; the hosts end when its other end is closed, even if their owner is killed
#
# Exit status: 0 up, 77 a requirement is missing here (the reason is on standard error), 1 failed.
set -u
here=$(cd -- "$(dirname -- "$0")" && pwd -P)
N=${N:-4} D=${D:-${TMPDIR:-/tmp}/testbed/hosts} NET=${NET:-10.77.0} PFX=${PFX:-h} PORT=${PORT:-2222} BED=${BED:-bed}
FAMILY=${FAMILY:-4} SHARE=${SHARE:-} SSH_USER=${SSH_USER:-root} OVERLAY=${OVERLAY:-} LINK=${LINK:-} LIFELINE=${LIFELINE:-}
read -r -a called <<<"${CALLED:-}"
export D BED

main() {
    check_means
    if is_up; then
        echo "$D"
        return
    fi
    [ -e "$D/run" ] && bash "$here/netns_down.sh" # remove a bed that is only half up
    umask 022
    mkdir -p "$D/run" "$D/key" "$D/etc" "$D/log" || die "cannot make $D"
    make_keys
    write_configuration
    write_on
    make_switch
    for ((i = 0; i < N; i++)); do start_host "$PFX$i" "$i"; done
    for ((i = 0; i < N; i++)); do await_sshd "$PFX$i"; done
    if [ -n "$LINK" ]; then
        # shellcheck disable=SC2086 # several words
        bash "$here/netns_link.sh" all $LINK || die "links: $LINK"
    fi
    echo "$D"
}

skip() {
    echo "SKIP: $*" >&2
    exit 77
}

die() {
    echo "FAIL: $*" >&2
    exit 1
}

check_means() {
    local tool
    [ "$(id -u)" = 0 ] || skip "hosts in network namespaces need root"
    for tool in ip tc unshare nsenter ssh ssh-keygen /usr/sbin/sshd; do
        command -v "$tool" >/dev/null || skip "no $tool (apt-get install openssh-server iproute2 util-linux)"
    done
    ip netns add "$BED-probe" 2>/dev/null || skip "no permission for ip netns (needs CAP_SYS_ADMIN and CAP_NET_ADMIN)"
    ip netns del "$BED-probe"
}

is_up() {
    local pid
    for ((i = 0; i < N; i++)); do
        pid=$(cat "$D/run/$PFX$i.pid" 2>/dev/null) && [ -n "$pid" ] && kill -0 "$pid" 2>/dev/null || return 1
    done
}

# The name of host number $1 on itself.
name() {
    echo "${called[$1]:-$PFX$1}"
}

address() {
    if [ "$FAMILY" = 6 ]; then echo "fd77::$((10 + $1))"; else echo "$NET.$((10 + $1))"; fi
}

make_keys() {
    local uid
    [ -e "$D/key/id" ] || ssh-keygen -q -t ed25519 -N '' -f "$D/key/id" || die "ssh-keygen"
    cp "$D/key/id.pub" "$D/key/authorized_keys"
    uid=$(cat ${OVERLAY:+"$OVERLAY/etc/passwd"} /etc/passwd 2>/dev/null |
        awk -F: -v user="$SSH_USER" '$1 == user { print $3; exit }')
    chown "${uid:?no user $SSH_USER}" "$D/key/id" # ssh refuses a private key of another user
}

write_configuration() {
    local h at
    : >"$D/key/known_hosts"
    echo "127.0.0.1 localhost" >"$D/etc/hosts"
    for word in N PFX NET PORT BED SHARE FAMILY; do printf '%s=%q\n' "$word" "${!word}"; done >"$D/env"
    for ((i = 0; i < N; i++)); do
        h=$PFX$i at=$(address "$i")
        [ -e "$D/key/host_$h" ] || ssh-keygen -q -t ed25519 -N '' -f "$D/key/host_$h" || die "ssh-keygen"
        echo "[$at]:$PORT,[$h]:$PORT,[$(name "$i")]:$PORT $(cut -d' ' -f1,2 "$D/key/host_$h.pub")" >>"$D/key/known_hosts"
        echo "$at $(name "$i") $h" >>"$D/etc/hosts"
        cat >"$D/etc/sshd_$h" <<END
Port $PORT
HostKey $D/key/host_$h
AuthorizedKeysFile $D/key/authorized_keys
PidFile $D/run/sshd_$h.nspid
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
StrictModes no
MaxStartups 200
LogLevel VERBOSE
END
    done
    cat >"$D/ssh_config" <<END
Host *
  Port $PORT
  User $SSH_USER
  IdentityFile $D/key/id
  IdentitiesOnly yes
  UserKnownHostsFile $D/key/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  BatchMode yes
  ConnectTimeout 5
  LogLevel ERROR
END
}

# nsenter -p forks and forwards no signals, so `on` does. Each host has its own /tmp: PRRTE names folders there by pid.
write_on() {
    cat >"$D/on" <<END
#!/bin/bash
# on HOST COMMAND...: runs a command inside a host; signals are forwarded.
h=\$1; shift
export TMPDIR=/tmp
nsenter -t "\$(cat "$D/run/\$h.pid")" -m -u -i -n -p --wd="\$PWD" "\$@" <&0 & n=\$!
forward() { for c in \$(cat "/proc/\$n/task/\$n/children" 2>/dev/null); do kill "-\$1" "\$c"; done; }
for s in TERM INT HUP QUIT USR1 USR2 CONT TSTP; do trap "forward \$s" "\$s"; done
while :; do wait "\$n"; r=\$?; kill -0 "\$n" 2>/dev/null || exit "\$r"; done
END
    chmod +x "$D/on"
}

# The bridge is in a namespace of its own; nothing outside is touched.
make_switch() {
    ip netns add "$BED-switch" || die "namespace of the switch"
    switch link set lo up
    switch link add br0 type bridge || die "bridge"
    switch link set br0 up
}

switch() {
    ip -n "$BED-switch" "$@"
}

start_host() {
    local h=$1 i=$2 outer pid=
    ip netns add "$BED-$h" || die "namespace of $h"
    ip -n "$BED-$h" link set lo up
    switch link add "v$h" type veth peer name eth0 netns "$BED-$h" || die "link of $h"
    ip netns exec "$BED-switch" sysctl -qw "net.ipv6.conf.v$h.disable_ipv6=1" 2>/dev/null
    if [ "$FAMILY" = 6 ]; then
        ip -n "$BED-$h" addr add "$(address "$i")/64" dev eth0 nodad
    else
        ip -n "$BED-$h" addr add "$(address "$i")/24" dev eth0
    fi
    ip -n "$BED-$h" link set eth0 up
    switch link set "v$h" master br0 up
    write_init "$h" "$(name "$i")"
    env -i PATH="$PATH" HOME="$HOME" LANG=C.UTF-8 setsid nsenter "--net=/run/netns/$BED-$h" \
        unshare -m -u -i -p -f --mount-proc bash "$D/etc/init_$h" </dev/null >"$D/log/init_$h" 2>&1 &
    outer=$!
    for _ in $(seq 250); do
        pid=$(tr -d ' ' 2>/dev/null <"/proc/$outer/task/$outer/children")
        [ -n "$pid" ] && break
        sleep 0.02
    done
    [ -n "$pid" ] || die "init of $h did not start: $(cat "$D/log/init_$h")"
    echo "$pid" >"$D/run/$h.pid"
}

# Process 1 of the host. It mounts the sysfs of the new network (UCX reads /sys/class/net), with the old cgroups (slurmd
# looks for them). A pid namespace needs its own /tmp.
write_init() {
    local h=$1 own=$2
    cat >"$D/etc/init_$h" <<END
#!/bin/bash
hostname $own
mount --make-rprivate /
for d in usr etc home; do
    [ -n "$OVERLAY" ] && [ -d "$OVERLAY/\$d" ] && mount -t overlay overlay -o "lowerdir=$OVERLAY/\$d:/\$d" "/\$d"
done
mount -t tmpfs -o mode=1777 shm /dev/shm
mount -t tmpfs -o mode=755 run /run
mkdir -p /run/sshd
if mountpoint -q /sys/fs/cgroup; then mkdir /run/cg; mount --rbind /sys/fs/cgroup /run/cg; fi
mount -t sysfs sys /sys
[ -d /run/cg ] && mount --move /run/cg /sys/fs/cgroup
mkdir /run/t
mount -t tmpfs -o mode=1777 tmp /run/t
IFS=: read -r -a shared <<<"$SHARE:$(dirname "$D")"
for s in "\${shared[@]}"; do
    case \$s in /tmp/*) mkdir -p "/run/t\${s#/tmp}"; mount --rbind "\$s" "/run/t\${s#/tmp}" ;; esac
done
mount --move /run/t /tmp
mount --bind "$D/etc/hosts" /etc/hosts
echo $own >/run/hostname
mount --bind /run/hostname /etc/hostname
cat /proc/sys/kernel/random/uuid >/run/boot_id
mount --bind /run/boot_id /proc/sys/kernel/random/boot_id
tr -d - </run/boot_id >/run/machine-id
[ -e /etc/machine-id ] && mount --bind /run/machine-id /etc/machine-id
/usr/sbin/sshd -f "$D/etc/sshd_$h" -E "$D/log/sshd_$h"
if [ -n "$LIFELINE" ]; then
    read -r <&${LIFELINE:-0} # ends when the owner of the other end is gone
    kill -KILL -1
else
    while :; do sleep 3600 & wait; done
fi
END
}

await_sshd() {
    for _ in $(seq 100); do
        "$D/on" "${PFX}0" ssh -F "$D/ssh_config" "$1" true 2>"$D/log/wait" && return
        sleep 0.05
    done
    die "ssh $1: $(cat "$D/log/wait"; tail -3 "$D/log/sshd_$1")"
}

main
