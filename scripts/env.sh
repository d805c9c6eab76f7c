#!/bin/sh
# Makes .venv with the project and its tools; on Debian and Ubuntu, as root, also what that needs.
set -eu

python=${PYTHON:-python3}

missing=
command -v gcc >/dev/null || missing="$missing gcc"
command -v g++ >/dev/null || missing="$missing g++"
"$python" -c 'import ensurepip, venv' 2>/dev/null || missing="$missing python3-venv"
echo '#include <stddef.h>
#include <pthread.h>' | gcc -E - >/dev/null 2>&1 || missing="$missing libc6-dev"
if [ -n "$missing" ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -qq
        # shellcheck disable=SC2086
        apt-get install -qq -y --no-install-recommends $missing
    else
        echo "missing:$missing; install them (apt-get install$missing), then run make again" >&2
        exit 1
    fi
fi

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "Python 3.11 or newer is needed, $("$python" --version) was found; set PYTHON=..." >&2
    exit 1
}

[ -x .venv/bin/pip ] || "$python" -m venv .venv
.venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,demo]'
.venv/bin/python -m compileall -q jobs toolkit transport # as pip does with what it copies
