#!/usr/bin/env bash
# Makes or refreshes the environment: tools/setup.sh VENV [EXTRA]. Run again, it returns at once unless something changed.
#   PYTHON        interpreter that makes the environment (3.11 or newer); default: the first one found
#   NANORL_TORCH  torch requirement instead of the automatic choice below, for example "torch==2.12.0"
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${1:?usage: tools/setup.sh VENV [EXTRA]}
extra=${2:-}
python="$venv/bin/python"
# The release that the tests are run with. Naming one, rather than the newest, lets a CPU wheel that pip has been told of win:
# 2.13.0+cpu sorts above 2.13.0, but below a later 2.14.
cpu_torch="torch==2.13.0"
cpu_index="https://download.pytorch.org/whl/cpu"

say() { printf '==> %s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 2; }
# Without compiling: Python does that at the first import, and only for what is used.
pip_install() { "$python" -m pip --disable-pip-version-check install --no-compile "$@"; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "nanorl needs Python 3.11 or newer; ${PYTHON:-python3} is absent or older. Say which: make PYTHON=/path/to/python3"
}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; }

# Would pip, called with these arguments, take a CPU build of torch? Looks only at names and metadata, and gives up quickly:
# an index that can't be reached must not hold up the set-up.
finds_cpu_build() {
    timeout 90 "$python" -m pip install --dry-run --quiet --report - --no-deps --ignore-installed --only-binary :all: \
        --timeout 10 --retries 1 "$@" "$cpu_torch" 2>/dev/null |
        "$python" -c 'import json, sys; sys.exit("+cpu" not in json.load(sys.stdin)["install"][0]["metadata"]["version"])' \
            2>/dev/null
}

install_torch() {
    if "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'; then
        say "torch: kept as it is"
    elif [ -n "${NANORL_TORCH:-}" ]; then
        say "torch: $NANORL_TORCH, as NANORL_TORCH says"
        pip_install "$NANORL_TORCH"
    elif [ "$(uname -s)" != Linux ] || has_gpu; then
        say "torch: pip's own choice, which fits this machine; it comes with the project"
    elif finds_cpu_build; then
        say "torch: no NVIDIA GPU here, so the CPU build that pip is configured for"
        pip_install "$cpu_torch"
    elif finds_cpu_build --index-url "$cpu_index"; then
        say "torch: no NVIDIA GPU here, so the CPU build from $cpu_index"
        pip_install --index-url "$cpu_index" "$cpu_torch"
    else
        say "torch: warning: no CPU build found; pip's own choice may be a CUDA build of several GB."
        say "       Stop with Ctrl-C and name another one if you can: NANORL_TORCH='torch @ file:///path/to/wheel' make ..."
    fi
}

# Everything that the environment depends on; the folder too, because an editable install points to it.
key=$(cat pyproject.toml tools/setup.sh <(pwd) | cksum | cut -d ' ' -f 1)
stamp() { printf '%s/nanorl-setup-%s-%s' "$venv" "${1:-run}" "$key"; }
if [ -e "$(stamp "$extra")" ] && [ -x "$python" ]; then
    exit 0
fi

say "[1/3] environment in $venv"
if ! "$python" -m pip --version >/dev/null 2>&1; then
    base=$(find_python)
    "$base" -m venv "$venv" || fail "$base -m venv failed; on Debian and Ubuntu: apt install python3-venv"
fi
pip_install --quiet --upgrade pip # an old pip fetches whole wheels where it only needs their metadata
say "[2/3] torch"
install_torch
say "[3/3] nanorl and what it needs${extra:+, with the $extra tools}"
pip_install --editable ".${extra:+[$extra]}"

rm -f "$venv"/nanorl-setup-*
touch "$(stamp)" "$(stamp "$extra")" # an extra holds everything that the plain set-up does
say "ready in $SECONDS s"
