#!/bin/sh
# Makes the environment in which the decode kernel of src/tandem/engines/inference/paged_kernel.py is tested without a GPU:
# triton with its interpreter, the NumPy that this interpreter still works with, and everything else from Tandem's own.
#
#     sh scripts/triton_env.sh [FOLDER]      # default: envs/triton; about 0.7 GB. TANDEM_TRITON names another to the tests
#
# Needs Linux on x86, and PYTHON, the interpreter of the environment that has Tandem (default: .venv/bin/python).
set -eu
folder=${1:-envs/triton}
python=${PYTHON:-.venv/bin/python}

[ -d "$folder" ] || "$python" -m venv "$folder"
"$folder/bin/python" -m pip install -q triton==3.6.0 'numpy<2.3'
site='import sysconfig; print(sysconfig.get_path("purelib"))'
# A path file puts the packages of Tandem's environment behind this one's own.
"$python" -c "$site" >"$("$folder/bin/python" -c "$site")/tandem.pth"
