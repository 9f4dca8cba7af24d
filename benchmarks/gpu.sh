#!/bin/bash
# Runs the parts of benchmarks/gpu.py on one GPU, one after the other, in about ten minutes.
#
#   bash benchmarks/gpu.sh [FOLDER] [--toy]
#
# The results are benchmarks/results/gpu_*.json; what the parts printed, and a profile of 6L-6L, go to FOLDER
# (runs/gpu). A part that fails does not stop the others; the exit code is then 1. Variable: PYTHON (python).
folder=runs/gpu
if [[ -n ${1:-} && $1 != -* ]]; then
  folder=$1
  shift
fi
mkdir -p "$folder" || exit
number=0 failed=0
export XLA_CLIENT_MEM_FRACTION=${XLA_CLIENT_MEM_FRACTION:-0.94}

part() { # seconds at most, options
  local limit=$1 begin=$SECONDS
  shift
  local log="$folder/gpu_$((++number)).log"
  if timeout "$limit" "${PYTHON:-python}" -m benchmarks.gpu "--part=$@" >"$log" 2>&1; then
    echo "== $* ($((SECONDS - begin)) s)"
  else
    echo "== $* FAILED ($((SECONDS - begin)) s)"
    failed=1
  fi
  tail -n 15 "$log" | cut -c 1-600
}

{ nvidia-smi || true; } >"$folder/nvidia_smi.txt" 2>&1
part 120 6L --trace="$folder/trace" "$@"
part 120 6L --kernels=plain "$@"
part 120 100L --updates=10 "$@"
part 150 500L --updates=5 "$@"
part 60 pytorch "$@"
part 120 pytorch --compile "$@"
part 60 shapes "$@"
part 120 beam "$@"
part 200 kernels "$@"
exit "$failed"
