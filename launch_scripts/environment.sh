# shellcheck shell=sh
# Sourced by the scripts beside it: finds Python, makes a virtual environment if none is active, and installs the
# project into it. Later runs find everything in place. Needs `here`, the folder of the script that sources it.
#
#   prepare EXTRA     make the environment's `python`, `poprun` and `mpirun` the current ones, in two steps:
#   enter               first half: `python` is in PATH, and `environment` is the folder
#   install EXTRA       second half
#   run COMMAND...    print the command and run it; its exit status is the script's
#   quoted WORD...    print the words as a user would type them

root=$(CDPATH='' cd -- "${here:?}/.." && pwd -P) || exit 1

say() {
    printf '%s\n' "$*" >&2
}

fail() {
    say "error: $*"
    exit 1
}

prepare() {
    enter
    install "$1"
}

enter() {
    if environment=${VIRTUAL_ENV:-${CONDA_PREFIX:-}} && [ -n "$environment" ]; then
        [ -x "$environment/bin/python" ] ||
            fail "the active environment $environment has no bin/python; deactivate it, or make it again"
        is_recent "$environment/bin/python" ||
            fail "the active environment $environment has a Python older than 3.11; deactivate it, or use another"
    else
        environment=$root/.venv
        make_environment
    fi
    PATH=$environment/bin:$PATH
    export PATH
}

# An environment's scripts contain its path, so an environment that was moved or copied with the project is made again.
make_environment() {
    made_for=$(cat "$environment/made-for" 2>/dev/null || true)
    if [ "$made_for" = "$environment" ] && is_recent "$environment/bin/python"; then
        return
    fi
    python=$(find_python) || exit 1
    say "Making a virtual environment in $environment with $python."
    [ -z "$made_for" ] || rm -rf "$environment"
    "$python" -m venv "$environment" >&2 ||
        fail "$python cannot make a virtual environment; on Debian and Ubuntu install python3-venv first"
    printf '%s\n' "$environment" >"$environment/made-for"
}

find_python() {
    for python in ${PYTHON:+"$PYTHON"} python3 python3.14 python3.13 python3.12 python3.11 python; do
        if is_recent "$python"; then
            printf '%s\n' "$python"
            return
        fi
    done
    fail "no Python 3.11 or newer found; install one, or name it: PYTHON=/path/to/python3 sh $0"
}

is_recent() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

# Installs only if a file that the installation is made of, or the path, has changed since: the stamp has both.
install() {
    stamp=$environment/popdist-everywhere
    wanted=$(made_of)
    for other in "$1" dev; do # dev includes all other extras except horovod
        if [ "$(cat "$stamp-$other" 2>/dev/null)" = "$wanted" ]; then
            return
        fi
    done
    python -m pip --version >/dev/null 2>&1 ||
        fail "the environment $environment has no pip; run: python -m ensurepip"
    say "Installing the project and its dependencies into $environment (a minute or two, once)."
    (cd -- "$root" && python -m pip install --quiet --disable-pip-version-check --editable ".[$1]" >&2) ||
        fail "pip could not install the project; is the package index reachable? pip's message is above"
    printf '%s\n' "$wanted" >"$stamp-$1"
}

# The checksums of the files that an installation is made of, and the path.
made_of() {
    (cd -- "$root" && cksum setup.cfg pyproject.toml setup.py collectives/native/kernel.c && pwd)
}

run() {
    say "+ $(quoted "$@")"
    "$@"
}

# The words, quoted so that a shell reads them back unchanged.
quoted() {
    separator=
    for word in "$@"; do
        case $word in
            '' | *[!A-Za-z0-9_./:=,@%+-]*) word="'$(printf '%s' "$word" | sed "s/'/'\\\\''/g")'" ;;
        esac
        printf '%s%s' "$separator" "$word"
        separator=' '
    done
}

is_root() {
    [ "$(id -u)" -eq 0 ]
}
