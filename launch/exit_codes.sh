# shellcheck shell=bash
# The rule by which launch/slurm.sbatch and launch/tpu_vm.sh react to the exit code of the program. Source this file.
#
# | exit code     | meaning (see branchnorm_jax/errors.py)                  | decision                               |
# |---------------|---------------------------------------------------------|----------------------------------------|
# | 0             | finished                                                | done                                   |
# | 129, 130,     | saved after SIGHUP, SIGINT,                             | again: start again, without a limit    |
# | 138, 143      | SIGUSR1 or SIGTERM                                      |                                        |
# | 4             | another host was lost                                   | retry: start again, MAX_RETRIES times  |
# | 131 ... 159   | killed by another signal: a crash, or no memory left    | retry, like a lost host                |
# | other         | 2 user error, 3 diverged, 5 storage failed, 6, 1, ...   | stop: another start would fail, too    |
#
# The manifests launch/gke_jobset*.yaml state the same rule in their failure policies.

MAX_RETRIES=${MAX_RETRIES:-3}

# decide <exit code> <retries so far>: prints done, again, retry or stop.
decide() {
  local code=$1 retries=$2
  case $code in
    0) echo "done" ;;
    129 | 130 | 138 | 143) echo "again" ;;
    4 | 1[345]?)
      if ((retries < MAX_RETRIES)); then echo "retry"; else echo "stop"; fi
      ;;
    *) echo "stop" ;;
  esac
}
