#!/usr/bin/env bash
# A real SGLang on a machine without a GPU (Linux, x86-64), for trying and testing. SGLang's own files stay as they are.
#   sglang_cpu.sh install                 its environment, once: about 2.6 GB under $NANORL_SGLANG_CPU_ROOT
#   sglang_cpu.sh serve FLAGS...          `python -m sglang.launch_server FLAGS...`, with what a CPU needs put before
#   sglang_cpu.sh with MODEL COMMAND...   runs COMMAND with a server of MODEL in fp32 at NANORL_SGLANG_URL, then stops it
# nanorl starts it by itself with NANORL_SGLANG="tools/sglang_cpu.sh serve" and --engine sglang.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=${NANORL_SGLANG_CPU_ROOT:-${XDG_CACHE_HOME:-$HOME/.cache}/nanorl-sglang-cpu}
venv=$root/venv
server_only=$root/sgl # torchvision beside a CPU torch breaks transformers for others: only the server sees this folder
version=0.5.23

fail() { printf 'error: %s\n' "$*" >&2; exit 2; }
pip_install() { "$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-compile "$@"; }

install() {
    local stamp="$root/installed-$version"
    [ -e "$stamp" ] && [ -x "$venv/bin/python" ] && return
    "$here/setup.sh" "$venv" # for its choice of a CPU build of torch
    printf '==> SGLang %s in %s\n' "$version" "$root"
    # What SGLang imports on a CPU, pinned where its own package is, ...
    pip_install transformers==5.19.0 tokenizers==0.23.2 sentencepiece==0.2.1 openai==2.8.0 soundfile==0.13.1 \
        accelerate aiohttp distro dill easydict einops fastapi gguf interegular IPython jsonschema loguru msgspec numpy \
        orjson packaging partial_json_parser pillow 'prometheus-client>=0.20' psutil pybase64 pydantic 'python-dateutil<3' \
        python-multipart pyzmq regex requests safetensors scipy setproctitle setuptools tiktoken tqdm 'uvicorn>=0.51' \
        uvloop watchfiles zstandard
    # ... and the packages that would bring a CUDA torch and 5 GB along, without what they ask for.
    pip_install --no-deps --upgrade --target "$server_only" "sglang==$version" torchvision==0.28.0 triton==3.8.0 \
        compressed-tensors==0.18.0 xgrammar==0.2.7 apache-tvm-ffi==0.1.11
    touch "$stamp"
}

serve() {
    [ -x "$venv/bin/python" ] && [ -d "$server_only/sglang" ] || fail "SGLang is not installed in $root: $0 install"
    export PYTHONPATH="$here/sglang_cpu:$server_only${PYTHONPATH:+:$PYTHONPATH}" SGLANG_USE_CPU_ENGINE=1
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
    exec "$venv/bin/python" -W ignore "$here/sglang_cpu/launch.py" --device cpu --attention-backend torch_native \
        --max-total-tokens 20000 --max-running-requests 32 --mem-fraction-static 0.3 --grammar-backend none \
        --cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled --sleep-on-idle \
        --skip-server-warmup "$@"
}

with_server() {
    local model=$1 port
    shift
    port=$("$venv/bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    log=$(mktemp)
    (serve --model-path "$model" --host 127.0.0.1 --port "$port" --dtype float32) >"$log" 2>&1 &
    server=$!
    trap 'kill "$server" 2>/dev/null || true; wait "$server" || true; rm -f "$log"' EXIT # of the script, not of the function
    trap 'exit 130' INT
    trap 'exit 143' TERM
    export NANORL_SGLANG_URL=http://127.0.0.1:$port NANORL_SGLANG="$here/sglang_cpu.sh serve"
    for _ in $(seq 240); do
        if "$venv/bin/python" -c "import urllib.request as u; u.urlopen('$NANORL_SGLANG_URL/model_info', timeout=2)" 2>/dev/null; then
            "$@" && return 0 || return $?
        fi
        kill -0 "$server" 2>/dev/null || break
        sleep 0.5
    done
    tail -n 20 "$log" >&2
    fail "SGLang did not get ready"
}

case ${1:-} in
install) install ;;
serve) shift; serve "$@" ;;
with) shift; with_server "$@" ;;
*) sed -n '2,6s/^# //p' "$0"; exit 2 ;;
esac
