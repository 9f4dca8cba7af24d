#!/usr/bin/env bash
# Trains in a GKE cluster that XPK manages (pip install xpk; the cluster was made by `xpk cluster create`).
#
#   export CLUSTER=my-cluster TPU_TYPE=v6e-16 IMAGE=us-docker.pkg.dev/project/repository/branchnorm:xpk
#   launch/xpk.sh --config=configs/text.py:100L-100L --workdir=/shared/run --config.data.path=/shared/text
#   launch/xpk.sh --dry-run --config=...                           # prints the command, runs nothing
#
# The options are those of main.py; launch/Dockerfile builds the image (PLATFORM=tpu, RUN_AS=0). The workload restarts
# after exit code 4 and after signals (XPK's default: 127 ... 255), and stops after 2, 3 and 5. XPK counts every restart,
# so MAX_RESTARTS also limits the number of preemptions. `xpk workload delete` makes the run save and stop.
# Variables: WORKLOAD (name, branchnorm), NUM_SLICES (1), MAX_RESTARTS (50), XPK_FLAGS (more flags, divided at white
# space: --project, --zone, --priority=..., and --storage=... for a volume at /shared that `xpk storage attach` has
# added). Without XPK, use launch/gke_jobset.yaml.

set -euo pipefail

dry_run=0
if [[ ${1:-} == --dry-run ]]; then
  dry_run=1
  shift
fi
if (($# == 0)); then
  sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
for variable in CLUSTER IMAGE TPU_TYPE; do
  if [[ -z ${!variable:-} ]]; then
    echo "xpk.sh: set $variable, as in the first lines of this script" >&2
    exit 2
  fi
done

# XPK sends SIGTERM to the shell that runs the command; `exec` puts the program in its place.
printf -v command ' %q' "$@"
command="exec python main.py --config.parallel.distributed=True$command"
read -r -d '' -a flags <<<"${XPK_FLAGS:-}" || true
create=(xpk workload create --cluster="$CLUSTER" --workload="${WORKLOAD:-branchnorm}" --docker-image="$IMAGE"
  --tpu-type="$TPU_TYPE" --num-slices="${NUM_SLICES:-1}" --max-restarts="${MAX_RESTARTS:-50}"
  --restart-on-exit-codes=4 --termination-grace-period-seconds=300 ${flags[@]+"${flags[@]}"} --command="$command")
if ((dry_run)); then
  printf '%q ' "${create[@]}"
  echo
else
  exec "${create[@]}"
fi
