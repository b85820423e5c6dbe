#!/usr/bin/env bash
# Checks a GPU on a bare machine without a network, from one folder, in under four minutes, with one report.
#
#   bench/gpu_check.sh pack FOLDER          writes the folder: wheels, tests, this script, the expected logits
#   FOLDER/gpu_check.sh run FOLDER [NAME]   on the machine with the GPU: writes FOLDER/report.md
#
# NAME chooses the GPU as HETEROLLM_GPU does (default: the first one). For another Python than this one, and for a
# machine that has some packages already:
#
#   PYTHON_VERSION=3.12 WITHOUT="numpy onnx onnxruntime" bench/gpu_check.sh pack FOLDER
#
# `pack` needs a network and the environment of the tests (PYTHON, default python3), `run` Python with pip alone;
# LIMIT_S changes its 230 seconds.
set -euo pipefail
mode=${1:-} folder=${2:-}
[ -n "$folder" ] && { [ "$mode" = pack ] || [ "$mode" = run ]; } || { sed -n '2,16p' "$0"; exit 2; }
python=${PYTHON:-python3}

pack() {
    cd "$(dirname "$0")/.."
    rm -rf "$folder" && mkdir -p "$folder/wheels" "$folder/tests" "$folder/build"
    # A copy, since setuptools leaves its files in the sources.
    cp -r heterollm kernels profiler solver docs pyproject.toml README.md LICENSE "$folder/build"
    "$python" -m pip wheel -q --no-deps -w "$folder/wheels" "$folder/build"
    rm -r "$folder/build"
    cp -r tests/kernels tests/helpers tests/conftest.py "$folder/tests"
    cp pyproject.toml bench/gpu_check.py bench/gpu_check.sh "$folder"
    find "$folder/tests" -name __pycache__ -prune -exec rm -r {} +
    local version=${PYTHON_VERSION:-$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')}
    local platforms=(any) wanted=() name
    for name in 2_35 2_34 2_31 2_28 2_27 2_26 2_24 2_17 2_12 2_5; do platforms+=("manylinux_${name}_$(uname -m)"); done
    platforms+=("manylinux2014_$(uname -m)" "manylinux2010_$(uname -m)" "manylinux1_$(uname -m)")
    for name in $("$python" -P bench/gpu_check.py packages ${WITHOUT:-}); do wanted+=("$name"); done
    "$python" -m pip download -q --no-deps --only-binary=:all: --implementation cp --python-version "$version" \
        "${platforms[@]/#/--platform=}" -d "$folder/wheels" "${wanted[@]}"
    "$python" -P bench/gpu_check.py expect "$folder/expected.npz"
    du -sh "$folder"
}

run() {
    folder=$(cd "$folder" && pwd)
    begin=$SECONDS
    "$python" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$folder/site" "$folder"/wheels/*.whl
    export PYTHONPATH="$folder/site:$folder/tests/helpers" HETEROLLM_CACHE="$folder/cache"
    # pyopencl's loader reads a folder of names; a container may have the driver and no such folder.
    if [ -z "${OCL_ICD_VENDORS:-}" ] && ! ls /etc/OpenCL/vendors/*.icd >/dev/null 2>&1; then
        mkdir -p "$folder/vendors"
        find /usr/lib /usr/lib64 /usr/local /opt -name 'libnvidia-opencl.so.1' -o -name 'libamdocl64.so*' \
            -o -name 'libigdrcl.so' 2>/dev/null | head -n 1 >"$folder/vendors/gpu.icd"
        export OCL_ICD_VENDORS="$folder/vendors"
    fi
    "$python" -P "$folder/gpu_check.py" report "$folder" "${3:-0}" $((${LIMIT_S:-230} - SECONDS + begin))
}

"$mode" "$@"
