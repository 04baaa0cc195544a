#!/bin/sh
# Makes $VENV with halfstep and its development tools, pinned by constraints.txt; with the PyTorch
# $OTHER_TORCH in place of the one named there, if that is set.
# Called by the Makefile; does nothing twice: the Makefile looks at $VENV/.ready.
set -eu
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
LOG=$VENV/setup.log

fail() {
    printf '\nSet-up failed: %s\nWhat to do: %s\n' "$1" "$2" >&2
    exit 1
}

command -v "$PYTHON" >/dev/null 2>&1 ||
    fail "there is no '$PYTHON' on the PATH." "install Python 3.11 or newer, or name it: make test PYTHON=/path/to/python3.12"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$PYTHON" --version) is too old; halfstep needs Python 3.11 or newer." "make test PYTHON=/path/to/python3.12"

[ -x "$VENV/bin/pip" ] || "$PYTHON" -m venv --clear "$VENV" ||
    fail "'$PYTHON -m venv' could not make $VENV." "on Debian or Ubuntu: apt install python3-venv; elsewhere use a Python that has venv and ensurepip"

CONSTRAINTS=constraints.txt
if [ -n "${OTHER_TORCH:-}" ]; then
    CONSTRAINTS=$VENV/constraints.txt
    sed "s/^torch==.*/torch==$OTHER_TORCH/" constraints.txt >"$CONSTRAINTS"
fi

echo "Setting up $VENV: torch and the tools that constraints.txt names, a minute or more, once ..."
echo "(log: $LOG)"
install() {
    "$VENV/bin/pip" install --disable-pip-version-check -c "$CONSTRAINTS" "$@" >>"$LOG" 2>&1 || {
        tail -n 15 "$LOG" >&2
        fail "pip could not install: $*" "read the lines above ($LOG has all). No network or no room on the disk are the usual causes; then run the same make command again"
    }
}
: >"$LOG"
install torch  # first and alone: it is the large one, and constraints.txt says which build
install -e '.[tools,dev,docs]'
touch "$VENV/.ready"
