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

# The CUDA version that the installed torch was built for; nothing for the CPU build. Without importing it: that takes seconds.
cuda_of_torch() {
    "$VENV/bin/python" -c 'import importlib.util as u, pathlib, runpy
version = pathlib.Path(u.find_spec("torch").origin).with_name("version.py")
print(runpy.run_path(str(version)).get("cuda") or "")'
}

echo "setting up $VENV (once, about two minutes)"
if [ ! -x "$VENV/bin/python" ]; then
    "$PYTHON" -m venv "$VENV" || { echo "making $VENV failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
fi

if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
    echo "  an NVIDIA GPU is here: torch with CUDA"
    must_pip "torch>=2.11"
    must_pip -e ".[code,dev,docs]"
else
    echo "  no NVIDIA GPU here: torch $TORCH, CPU build"
    # For a plain name some registries give the CPU build and others CUDA's: the CPU build is asked for by its own name first.
    index=${TORCH_INDEX:+--extra-index-url=$TORCH_INDEX}
    quiet_pip $index "torch==$TORCH+cpu" || must_pip $index "torch==$TORCH"
    if [ "$(cuda_of_torch)" ]; then
        echo "  the registry that pip is configured for has torch with CUDA $(cuda_of_torch) only: it works here too, but is gigabytes larger." >&2
        echo "  For the CPU build: make clean && make setup TORCH_INDEX=URL, an index that has it (pytorch.org, 'Get Started', CPU)." >&2
    fi
    echo "  Tandem and its development tools"
    must_pip -c constraints.txt -e ".[code,dev,docs]"
    # An optional backend, so that its tests run too: made against this torch, without programs of its own.
    echo "  DeepSpeed"
    quiet_pip setuptools wheel && DS_BUILD_OPS=0 DS_ACCELERATOR=cpu quiet_pip --no-build-isolation -c constraints.txt -e ".[deepspeed]" || {
        tail -n 3 "$LOG" >&2
        echo "  DeepSpeed could not be installed; all but actor.backend=deepspeed works, and its tests are skipped" >&2
    }
fi
# The file of axe-core, with which a slow test looks at every page of the viewer; the library around it is not needed.
quiet_pip --no-deps "axe-playwright-python==0.1.8" || echo "  axe-core could not be installed; its test is skipped" >&2
echo "  done"
