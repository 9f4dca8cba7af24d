#!/usr/bin/env bash
# Trains on a Cloud TPU slice: queued resource, installation, run on all workers, new start after a preemption.
#
#   export TPU_NAME=bn ZONE=us-east5-b ACCELERATOR=v6e-16
#   launch/tpu_vm.sh train --config=configs/text.py:100L-100L --workdir=gs://bucket/run --config.data.path=gs://bucket/text
#   launch/tpu_vm.sh create | setup | run <options> | delete       # the steps of train, one at a time
#   launch/tpu_vm.sh --dry-run train <options>                     # prints the commands, runs nothing
#
# The options are those of main.py. `train` starts again by the rule in launch/exit_codes.sh, on a new slice if this
# one was taken away, and deletes the slice at the end, also after an error (KEEP=1 keeps it). Ctrl-C, SIGTERM and
# SIGUSR1 make the run save and stop; the slice stays. Needs gcloud (a project, ssh keys: `ssh-add
# ~/.ssh/google_compute_engine`), and a bucket, or an NFS share that setup mounts at /mnt/share on all workers.
# Variables: SHARE (host:/path of the NFS share), RUNTIME (software of the slice, chosen from ACCELERATOR), CREATE_FLAGS
# (--spot; or --reserved, --network=... and so on; divided at white space; empty for on demand), PYTHON (3.11),
# MAX_RETRIES (after lost hosts in a row, 3), DELAY (seconds between starts and between polls, 60).

set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=launch/exit_codes.sh
source "$here/exit_codes.sh"

dry_run=0
if [[ ${1:-} == --dry-run ]]; then
  dry_run=1
  shift
fi
DELAY=${DELAY:-60}

say() { echo "tpu_vm.sh: $*" >&2; }

if [[ ! ${KEEP:=0} =~ ^[01]$ ]]; then
  say "KEEP=$KEEP: set it to 1 to keep the slice after training, or to 0"
  exit 2
fi

usage() {
  sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
  exit 2
}

# Ends the script if the variable $1 is not set.
need() {
  if [[ -z ${!1:-} ]]; then
    say "set $1, $2"
    exit 2
  fi
}

# Runs a command, or prints it.
call() {
  if ((dry_run)); then
    printf '%q ' "$@"
    echo
  else
    "$@"
  fi
}

tpus() { call gcloud compute tpus "$@" --zone="$ZONE"; }

ssh_to() { tpus tpu-vm ssh "$TPU_NAME" --worker="$1" --command="$2"; }

runtime() {
  case $ACCELERATOR in
    v6e*) echo v2-alpha-tpuv6e ;;
    v5p*) echo v2-alpha-tpuv5 ;;
    v5lite*) echo v2-alpha-tpuv5-lite ;;
    *) echo tpu-ubuntu2204-base ;;
  esac
}

# Prints a field of a queued resource or node, nothing if it does not exist, or UNKNOWN if gcloud fails otherwise.
describe() {
  local text errors
  errors=$(mktemp) || { echo UNKNOWN && return; }
  # gcloud also writes warnings to its standard error.
  if text=$(gcloud compute tpus "$1" describe "$TPU_NAME" --zone="$ZONE" --format="value($2)" 2>"$errors"); then
    echo "$text"
  elif ! grep -q NOT_FOUND "$errors"; then
    say "$(<"$errors")"
    echo UNKNOWN
  fi
  rm -f "$errors"
}

state() { describe queued-resources state.state; }

# Succeeds unless the slice is gone: after a preemption the node is PREEMPTED, and the queued resource SUSPENDED.
alive() { [[ $(state) =~ ^(ACTIVE|UNKNOWN)$ && $(describe tpu-vm state) =~ ^(READY|UNKNOWN)$ ]]; }

create() {
  local flags
  read -r -d '' -a flags <<<"${CREATE_FLAGS---spot}" || true
  tpus queued-resources create "$TPU_NAME" --node-id="$TPU_NAME" --accelerator-type="$ACCELERATOR" \
    --runtime-version="${RUNTIME:-$(runtime)}" ${flags[@]+"${flags[@]}"} || return
  ((dry_run)) && return
  local now
  while true; do
    now=$(state)
    case $now in
      ACTIVE) return ;;
      FAILED | SUSPENDING | SUSPENDED)
        say "the queued resource $TPU_NAME is $now; see: gcloud compute tpus queued-resources describe $TPU_NAME"
        return 1
        ;;
    esac
    say "waiting for $TPU_NAME: ${now:-requested}"
    sleep "$DELAY"
  done
}

# Copies the files of this checkout that git knows, and installs the package with the versions of the lock file.
# (`|| return`: `train` handles a failure of these functions, and bash then ignores `set -e` in them.)
setup() {
  local folder=. code=0
  if ! ((dry_run)); then
    folder=$(mktemp -d) || return
    (cd "$here/.." && git ls-files -z | tar --null --files-from=- --ignore-failed-read -czf "$folder/branchnorm.tar.gz") ||
      return
  fi
  tpus tpu-vm scp "$folder/branchnorm.tar.gz" "$TPU_NAME:branchnorm.tar.gz" --worker=all || code=$?
  if ! ((dry_run)); then rm -r "$folder"; fi
  if ((code)); then return "$code"; fi
  if [[ -n ${SHARE:-} ]]; then
    ssh_to all "mountpoint -q /mnt/share || { sudo mkdir -p /mnt/share && sudo mount -t nfs $SHARE /mnt/share; }" || return
  fi
  # The slice's own Python may be older than the project needs, so uv provides one.
  ssh_to all "mkdir -p branchnorm && cd branchnorm && tar -xzf ../branchnorm.tar.gz && \
python3 -m pip install --quiet --user uv && \
python3 -m uv venv --quiet --allow-existing --python ${PYTHON:-3.11} .venv && \
python3 -m uv pip install --quiet --python .venv/bin/python --constraint requirements-lock.txt '.[tpu,gs]'"
}

# Runs main.py on all workers. Before, it stops what an interrupted connection has left running.
run() {
  local command
  printf -v command ' %q' "$@"
  # shellcheck disable=SC2016 # The workers expand these variables.
  ssh_to all 'cd branchnorm; old=$(cat pid 2>/dev/null); '`
    `'if grep -qs main.py "/proc/$old/cmdline"; then kill "$old"; while test -e "/proc/$old"; do sleep 1; done; fi; '`
    `'echo $$ >pid; exec .venv/bin/python main.py --config.parallel.distributed=True'"$command" &
  local pid=$! code=0
  running=1
  while true; do
    interrupted=0
    wait "$pid" && code=0 || code=$?
    ((interrupted)) || break
  done
  running=0
  return "$code"
}

delete() { tpus queued-resources delete "$TPU_NAME" --force --quiet; }

renew() {
  if ! ((dry_run)) && [[ -n $(state) ]]; then delete || return; fi
  create && setup
}

# Deletes the slice when `train` ends, whatever the reason, unless a signal stopped it or KEEP is set.
# shellcheck disable=SC2329 # The trap calls it.
leave() {
  local code=$?
  trap - EXIT
  if ((stopped || KEEP)); then
    say "the slice $TPU_NAME may still be there (launch/tpu_vm.sh delete)"
  else
    delete || true
  fi
  exit "$code"
}

# One worker is enough: the processes agree on the update after which they stop.
running=0 stopped=0
# shellcheck disable=SC2329 # The traps call it.
forward() {
  interrupted=1 stopped=1
  if ! ((running)); then
    say "SIG$1 before the run"
    exit $((128 + $(kill -l "$1")))
  fi
  say "SIG$1: asking the run to save and stop"
  # shellcheck disable=SC2016
  ssh_to 0 "kill -$1"' $(cat branchnorm/pid)' || true
}

train() {
  local code decision step=setup retries=0
  trap leave EXIT
  if ((dry_run)) || ! alive; then step=renew; fi
  while true; do
    code=0
    if [[ $step == run ]]; then
      run "$@" || code=$?
      if ((stopped)); then
        say "stopped with exit code $code"
        exit "$code"
      fi
      # 255: ssh lost a worker. 1: gcloud failed, or the program did.
      if ((code == 255)); then code=4; fi
    elif $step; then
      step=run
      continue
    else
      say "$step failed with exit code $?"
      code=4
    fi
    decision=$(decide "$code" "$retries")
    # What the run ended with may follow from a preemption. A failed step is not tried more often than MAX_RETRIES.
    if [[ $decision == again || $decision == retry ]] ||
      [[ $step == run && ($code == 1 || $code == 4 || $code -gt 128) ]]; then
      sleep "$DELAY" # A preemption takes a while to show.
      if ! alive; then
        say "the slice $TPU_NAME is gone: $(state)"
        decision=renew
      fi
    fi
    say "exit code $code: $decision"
    case $decision in
      again) retries=0 ;;
      renew)
        if [[ $step == run ]]; then retries=0; else ((++retries)); fi
        step=renew
        ;;
      retry) retries=$((retries + 1)) ;;
      *) break ;;
    esac
  done
  exit "$code"
}

subcommand=${1:-}
case $subcommand in
  create | setup | run | delete | train) shift ;;
  *) usage ;;
esac
need TPU_NAME "to a name for the slice"
need ZONE "for example to us-east5-b"
if [[ $subcommand == create || $subcommand == train ]]; then need ACCELERATOR "for example to v6e-16"; fi
if [[ $subcommand == run || $subcommand == train ]]; then
  if (($# == 0)); then usage; fi
  interrupted=0
  trap 'forward INT' INT
  trap 'forward TERM' TERM
  trap 'forward USR1' USR1
fi
"$subcommand" "$@"
