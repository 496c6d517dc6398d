#!/bin/sh
# Trains a small network on handwritten digits with two workers that only a network connects. A user would start each in
# a terminal of its own; this script starts them in one terminal and shows which worker wrote each line.
#
#   sh launch_scripts/two_terminals.sh [arguments of popdist.examples.digits]
#
#   WORKERS=3     number of workers; 2 by default
#   PORT=4000     first port on localhost, for worker 0; 3737 by default
#
# Other users of this machine can reach these ports, so the workers share a secret, POPDIST_JOB_TOKEN. If none is set,
# this script makes one. It is only in the workers' environment and is not printed.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd -P)
# shellcheck source=environment.sh
. "$here/environment.sh"

workers=${WORKERS:-2}
port=${PORT:-3737}
patience_s=10 # time for workers that have lost another worker to end by themselves
grace_s=40    # time for workers to end after a signal: checkpoints take 30 s at most

running=    # workers that have not ended, each as number:process
status=0    # exit status of the first worker that failed
sleeper=    # process that ends when the time of the other workers is over
is_leaving= # whether a signal ends all workers
are_told=   # whether workers have been told to end because their time was over

check_number() { # NAME VALUE SMALLEST LARGEST
    case $2 in
        '' | *[!0-9]* | ??????*) ;;
        *) [ "$2" -lt "$3" ] || [ "$2" -gt "$4" ] || return 0 ;;
    esac
    fail "$1=$2 is not a whole number of $3 to $4"
}

start_worker() { # NUMBER COMMAND...
    number=$1
    shift
    config="{\"cluster\":{\"worker\":[$(addresses)]},\"task\":{\"type\":\"worker\",\"index\":$number}}"
    say "[worker $number] + TF_CONFIG='$config' $(quoted "$@")"
    open_pipe "$folder/$number.out"
    { exec <&5 3>&- 4>&- 5<&- && tag "$number"; } &
    exec 6>&4
    open_pipe "$folder/$number.err"
    { exec <&5 4>&- 5<&- 6>&- && tag "$number" >&2 && echo "$number" >&3; } &
    TF_CONFIG=$config "$@" >&6 2>&4 </dev/null 3>&- 4>&- 5<&- 6>&- &
    running="$running $number:$!"
    exec 4>&- 5<&- 6>&-
    [ -z "$is_leaving" ] || end_workers # the signal may have come before this worker was in the list
}

# Opens a new pipe here, to write as 4 and to read as 5. Otherwise each end waits until the other is opened. If a
# process is killed while it waits, the process at the other end waits for ever.
# Processes close foreign descriptors by `exec`: a redirection of a function keeps the descriptors that it closes open.
open_pipe() { # FILE
    mkfifo "$1"
    # shellcheck disable=SC2094 # reading and writing the same file is the purpose of a pipe
    exec 4<>"$1" 5<"$1" 4>"$1"
}

addresses() {
    separator=
    for_port=$port
    while [ "$for_port" -lt $((port + workers)) ]; do
        printf '%s"localhost:%s"' "$separator" "$for_port"
        separator=,
        for_port=$((for_port + 1))
    done
}

# Runs in a process of its own, which ends at the end of its input.
tag() { # NUMBER
    trap '' HUP INT TERM
    while IFS= read -r line || [ -n "$line" ]; do
        printf '[worker %s] %s\n' "$1" "$line"
    done
}

# A worker's number comes through the pipe when the worker has closed its error output.
await_workers() {
    while [ -n "$running" ]; do
        # A signal is lost if the worker's process still runs this shell's program.
        [ -z "$is_leaving" ] || [ -n "$sleeper" ] || start_sleeper "$patience_s"
        read -r ended <&3 || continue # interrupted by a signal
        case $ended in
            late) insist ;;
            *) note_end "$ended" ;;
        esac
    done
    end_sleeper
    wait # until all output has been passed on
}

note_end() { # NUMBER
    result=0
    rest=
    for worker in $running; do
        if [ "${worker%:*}" = "$1" ]; then
            wait "${worker#*:}" || result=$?
        else
            rest="$rest $worker"
        fi
    done
    running=$rest
    if [ "$result" -eq 0 ] || [ -n "$is_leaving" ]; then
        return
    fi
    say "error: worker $1 ended with exit status $result"
    [ "$status" -ne 0 ] || status=$result
    [ -n "$sleeper" ] || [ -z "$running" ] || start_sleeper "$patience_s"
}

# Ends the other workers, whose time is over: first by SIGTERM, then by SIGKILL.
insist() {
    sleeper=
    if [ -n "$are_told" ]; then
        signal_workers KILL
    else
        are_told=yes
        end_workers
        start_sleeper "$grace_s"
    fi
}

start_sleeper() { # SECONDS
    rm -f "$folder/sleeper"
    open_pipe "$folder/sleeper"
    { exec <&5 4>&- 5<&- && tag sleeper && echo late >&3; } &
    sleep "$1" >&4 3>&- 4>&- 5<&- &
    sleeper=$!
    exec 4>&- 5<&-
}

end_sleeper() {
    [ -z "$sleeper" ] || kill -KILL "$sleeper" 2>/dev/null || true # SIGKILL acts at once
}

# A stopped worker receives SIGTERM only after SIGCONT.
end_workers() {
    signal_workers TERM
    signal_workers CONT
}

signal_workers() { # NAME
    for worker in $running; do
        kill -s "$1" "${worker#*:}" 2>/dev/null || true
    done
}

make_token() {
    od -A n -N 16 -t x1 /dev/urandom | tr -d ' \n'
}

# shellcheck disable=SC2329 # traps call it
leave() { # STATUS
    is_leaving=yes
    [ "$status" -ne 0 ] || status=$1
    end_workers
}

check_number WORKERS "$workers" 1 64
check_number PORT "$port" 1 $((65536 - workers))
say "two_terminals.sh: trains on handwritten digits with $workers workers, as if each had a terminal of its own."
prepare examples
POPDIST_JOB_TOKEN=${POPDIST_JOB_TOKEN:-$(make_token)}
[ -n "$POPDIST_JOB_TOKEN" ] || fail "no secret could be read from /dev/urandom; set one: POPDIST_JOB_TOKEN=..."
export POPDIST_JOB_TOKEN
set -- python -m popdist.examples.digits --strategy multi-worker "$@"
folder=$(mktemp -d)
trap 'end_workers; end_sleeper; rm -rf "$folder"' EXIT
trap 'leave 129' HUP
trap 'leave 130' INT
trap 'leave 143' TERM
mkfifo "$folder/ends"
exec 3<>"$folder/ends"
next=0
while [ "$next" -lt "$workers" ] && [ -z "$is_leaving" ]; do
    start_worker "$next" "$@"
    next=$((next + 1))
done
await_workers
exit "$status"
