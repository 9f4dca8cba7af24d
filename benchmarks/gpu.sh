#!/bin/bash
# Runs the parts of benchmarks/gpu.py on one GPU, one after the other, in about eight minutes.
#
#   bash benchmarks/gpu.sh [FOLDER] [--toy]
#
# The results are benchmarks/results/gpu_*.json; what each part printed goes to FOLDER. A part that fails does not stop
# the others.
folder=${1:-runs/gpu}
shift
mkdir -p "$folder"
export XLA_CLIENT_MEM_FRACTION=${XLA_CLIENT_MEM_FRACTION:-0.94}

part() { # seconds at most, options
  local limit=$1 begin=$SECONDS
  shift
  local log="$folder/gpu_$(echo "$*" | tr -d ' ' | tr -c 'a-zA-Z0-9\n' '_').log"
  if timeout "$limit" python3 -m benchmarks.gpu "--part=$@" >"$log" 2>&1; then
    echo "== $* ($((SECONDS - begin)) s)"
  else
    echo "== $* FAILED ($((SECONDS - begin)) s)"
  fi
  tail -n 12 "$log" | cut -c 1-600
}

{ nvidia-smi || true; } >"$folder/nvidia_smi.txt" 2>&1
part 100 kernels "$@"
part 120 6L "$@"
part 120 6L --kernels=plain "$@"
part 120 100L --updates=10 "$@"
part 150 500L --updates=5 "$@"
part 60 pytorch "$@"
part 120 pytorch --compile "$@"
part 60 shapes "$@"
part 120 beam "$@"
