#!/bin/sh
# Makes $VENV and installs Tandem into it, with the CPU build of torch where there is no NVIDIA GPU.
set -eu
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
TORCH=2.13.0
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

if ! command -v "$PYTHON" >/dev/null 2>&1; then
    echo "Tandem needs Python 3.11 or newer, and '$PYTHON' is not there. Name another one: make PYTHON=python3.12 ..." >&2
    exit 1
fi
if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "Tandem needs Python 3.11 or newer, and $("$PYTHON" --version) is '$PYTHON'. Name another one: make PYTHON=python3.12 ..." >&2
    exit 1
fi

LOG=$(mktemp)
trap 'rm -f "$LOG"' EXIT
# pip's own words are shown only when it fails: registries with many locations make it print hundreds of lines.
quiet_pip() { "$VENV/bin/python" -m pip install --quiet "$@" >"$LOG" 2>&1; }
must_pip() {
    if ! quiet_pip "$@"; then
        cat "$LOG" >&2
        echo "pip could not install: $*" >&2
        exit 1
    fi
}

echo "setting up $VENV (once, about two minutes)"
if [ ! -x "$VENV/bin/python" ]; then
    "$PYTHON" -m venv "$VENV" || { echo "making $VENV failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
fi

if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
    echo "  an NVIDIA GPU is here: torch with CUDA"
    must_pip "torch>=2.11"
    must_pip -e ".[dev]"
else
    echo "  no NVIDIA GPU here: torch $TORCH, CPU build"
    # Where the configured registry gives the CUDA build for a plain name, TORCH_INDEX names an index that has the CPU build.
    quiet_pip "torch==$TORCH+cpu" || must_pip ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "torch==$TORCH"
    echo "  Tandem and its development tools"
    must_pip -c constraints.txt -e ".[dev]"
fi
echo "  done"
