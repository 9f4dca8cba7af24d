"""launch/tpu_vm.sh and launch/xpk.sh with stand-ins for gcloud and xpk."""

import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.launch.stubs import Answer, Stubs, kinds

SLICE = {"TPU_NAME": "bn", "ZONE": "z", "ACCELERATOR": "v6e-16", "DELAY": "0"}
OPTIONS = ("--config=c.py:6L-6L", "--workdir=/mnt/share/a b")
RUN = r"tpu-vm ssh .*exec \.venv/bin/python main\.py"
STATE = "queued-resources describe"
NODE = "tpu-vm describe"


@pytest.fixture
def stubs(tmp_path: Path) -> Stubs:
    stubs = Stubs(tmp_path, "gcloud", "xpk")
    stubs.answer(STATE, "ACTIVE")
    stubs.answer(NODE, "READY")
    return stubs


def tpu_vm(stubs: Stubs, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return stubs.run("launch/tpu_vm.sh", *arguments, **SLICE | variables)


def runs(stubs: Stubs) -> int:
    return sum(bool(re.search(RUN, " ".join(call))) for call in stubs.calls)


def test_create_waits_until_the_slice_is_active(stubs: Stubs) -> None:
    stubs.answer(STATE, "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE")
    assert tpu_vm(stubs, "create").returncode == 0
    assert stubs.calls[0] == [
        "gcloud", "compute", "tpus", "queued-resources", "create", "bn", "--node-id=bn", "--accelerator-type=v6e-16",
        "--runtime-version=v2-alpha-tpuv6e", "--spot", "--zone=z",
    ]  # fmt: skip
    assert kinds(stubs.calls) == ["create", "describe", "describe", "describe"]


@pytest.mark.parametrize("state", ["FAILED", "SUSPENDED"])
def test_create_fails_if_the_request_fails(stubs: Stubs, state: str) -> None:
    stubs.answer(STATE, "WAITING_FOR_RESOURCES", state)
    assert tpu_vm(stubs, "create").returncode == 1


@pytest.mark.parametrize(
    ("accelerator", "runtime"),
    [("v5litepod-16", "v2-alpha-tpuv5-lite"), ("v5p-32", "v2-alpha-tpuv5"), ("v4-8", "tpu-ubuntu2204-base")],
)
def test_runtime_and_flags(stubs: Stubs, accelerator: str, runtime: str) -> None:
    assert tpu_vm(stubs, "create", ACCELERATOR=accelerator, CREATE_FLAGS="--reserved\n--network=n").returncode == 0
    assert stubs.calls[0][-5:] == [
        f"--accelerator-type={accelerator}", f"--runtime-version={runtime}", "--reserved", "--network=n", "--zone=z",
    ]  # fmt: skip


def test_missing_variables_are_named(stubs: Stubs) -> None:
    for name in ("TPU_NAME", "ZONE", "ACCELERATOR"):
        done = tpu_vm(stubs, "train", *OPTIONS, **{name: ""})
        assert done.returncode == 2 and done.stderr.startswith(f"tpu_vm.sh: set {name}, "), done.stderr
    done = stubs.run("launch/xpk.sh", *OPTIONS, CLUSTER="c", IMAGE="i")
    assert done.returncode == 2 and done.stderr.startswith("xpk.sh: set TPU_TYPE, "), done.stderr
    assert not stubs.calls


def test_setup_copies_the_checkout_and_installs_the_extra(stubs: Stubs) -> None:
    assert tpu_vm(stubs, "setup").returncode == 0
    scp, ssh = stubs.calls
    assert scp[1:5] == ["compute", "tpus", "tpu-vm", "scp"]
    assert scp[6:] == ["bn:branchnorm.tar.gz", "--worker=all", "--zone=z"]
    assert ssh[4:7] == ["ssh", "bn", "--worker=all"]
    assert "--constraint requirements-lock.txt '.[tpu,gs]'" in ssh[7]


def test_run_starts_main_on_all_workers(stubs: Stubs) -> None:
    stubs.answer(RUN, 3)
    assert tpu_vm(stubs, "run", *OPTIONS).returncode == 3
    (call,) = stubs.calls
    assert call[4:7] == ["ssh", "bn", "--worker=all"]
    command = call[7].removeprefix("--command=")
    assert shlex.split(command)[-3:] == ["--config.parallel.distributed=True", *OPTIONS]
    subprocess.run(["bash", "-n", "-c", command], check=True)


@pytest.mark.parametrize(
    ("codes", "starts", "end"),
    [
        ([0], 1, 0), ([2], 1, 2), ([3], 1, 3), ([5], 1, 5), ([1], 1, 1),
        ([143, 0], 2, 0), ([138, 143, 138, 143, 138, 0], 6, 0),
        ([4, 0], 2, 0), ([255, 0], 2, 0), ([134, 0], 2, 0), ([4, 4, 4], 3, 4), ([4, 143, 4, 4, 4], 5, 4),
    ],
)  # fmt: skip
def test_train_starts_again_by_the_rule(stubs: Stubs, codes: list[Answer], starts: int, end: int) -> None:
    stubs.answer(RUN, *codes)
    done = tpu_vm(stubs, "train", *OPTIONS, MAX_RETRIES="2")
    assert done.returncode == end, done.stderr
    assert runs(stubs) == starts
    assert "create" not in kinds(stubs.calls)
    assert stubs.calls[-1][3:] == ["queued-resources", "delete", "bn", "--force", "--quiet", "--zone=z"]


@pytest.mark.parametrize("code", [255, 143, 134, 1])
def test_train_makes_a_new_slice_after_a_preemption(stubs: Stubs, code: int) -> None:
    stubs.answer(RUN, code, 0)
    # Before the run, after it (gone), before the deletion, and while the new slice is created.
    stubs.answer(STATE, "ACTIVE", "SUSPENDED", "SUSPENDED", "SUSPENDED", "PROVISIONING", "ACTIVE")
    done = tpu_vm(stubs, "train", *OPTIONS, MAX_RETRIES="0")
    assert done.returncode == 0, done.stderr
    order = [kind for kind in kinds(stubs.calls) if kind != "describe"]
    assert order == ["scp", "ssh", "ssh", "delete", "create", "scp", "ssh", "ssh", "delete"]


def test_train_creates_a_slice_that_does_not_exist_and_keeps_it(stubs: Stubs) -> None:
    stubs.answer(STATE, "", "", "ACTIVE")
    assert tpu_vm(stubs, "train", *OPTIONS, KEEP="1").returncode == 0
    order = [kind for kind in kinds(stubs.calls) if kind != "describe"]
    assert order == ["create", "scp", "ssh", "ssh"]


def test_a_mistyped_keep_is_refused_at_once(stubs: Stubs) -> None:
    """Later, the slice would stay and cost money."""
    done = tpu_vm(stubs, "train", *OPTIONS, KEEP="no")
    assert (done.returncode, stubs.calls) == (2, [])
    assert "KEEP=no: set it to 1" in done.stderr


NOT_FOUND = (1, "ERROR: NOT_FOUND: Resource 'projects/p/locations/z/queuedResources/bn' was not found")


def test_train_tries_a_failed_setup_again_and_deletes_the_slice_at_the_end(stubs: Stubs) -> None:
    stubs.answer("tpu-vm scp", 1, 0)
    assert tpu_vm(stubs, "train", *OPTIONS).returncode == 0
    assert [kind for kind in kinds(stubs.calls) if kind != "describe"] == ["scp", "scp", "ssh", "ssh", "delete"]
    stubs.forget()
    stubs.answer("tpu-vm scp", 0)
    stubs.answer("pip install", 1)
    assert tpu_vm(stubs, "train", *OPTIONS, MAX_RETRIES="2").returncode == 4
    assert [kind for kind in kinds(stubs.calls) if kind != "describe"] == ["scp", "ssh"] * 3 + ["delete"]


def test_train_makes_a_new_slice_if_one_is_taken_away_during_the_setup(stubs: Stubs) -> None:
    stubs.answer(STATE, NOT_FOUND, NOT_FOUND, "ACTIVE", "SUSPENDED", "SUSPENDED", "SUSPENDED", "ACTIVE")
    stubs.answer("tpu-vm scp", 255, 0)
    done = tpu_vm(stubs, "train", *OPTIONS)
    assert done.returncode == 0, done.stderr
    order = [kind for kind in kinds(stubs.calls) if kind != "describe"]
    assert order == ["create", "scp", "delete", "create", "scp", "ssh", "ssh", "delete"]


def test_a_failure_of_gcloud_is_no_reason_to_delete_the_slice(stubs: Stubs) -> None:
    stubs.answer(STATE, "ACTIVE", (1, "ERROR: There was a problem refreshing your current auth tokens"), "ACTIVE")
    stubs.answer(RUN, 4, 0)
    done = tpu_vm(stubs, "train", *OPTIONS, KEEP="1")
    assert done.returncode == 0 and "auth tokens" in done.stderr
    assert [kind for kind in kinds(stubs.calls) if kind != "describe"] == ["scp", "ssh", "ssh", "ssh"]


def test_a_signal_stops_the_run_and_keeps_the_slice(stubs: Stubs) -> None:
    stubs.answer(RUN, (143, 3.0))
    process = stubs.start("launch/tpu_vm.sh", "train", *OPTIONS, **SLICE)
    while not runs(stubs):
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 143, error
    assert stubs.calls[-1][4:8] == ["ssh", "bn", "--worker=0", "--command=kill -TERM $(cat branchnorm/pid)"]
    assert runs(stubs) == 1


def test_dry_run_prints_and_runs_nothing(stubs: Stubs) -> None:
    done = tpu_vm(stubs, "--dry-run", "train", *OPTIONS)
    assert done.returncode == 0, done.stderr
    assert kinds([shlex.split(line) for line in done.stdout.splitlines()]) == ["create", "scp", "ssh", "ssh", "delete"]
    assert stubs.calls == []


@pytest.mark.parametrize("arguments", [(), ("train",), ("run",), ("other",)])
def test_wrong_arguments_show_the_usage(stubs: Stubs, arguments: tuple[str, ...]) -> None:
    done = tpu_vm(stubs, *arguments)
    assert done.returncode == 2
    assert "launch/tpu_vm.sh train --config" in done.stderr
    assert stubs.calls == []


XPK = {"CLUSTER": "c", "TPU_TYPE": "v6e-16", "IMAGE": "image:tpu"}


def test_xpk_arguments(stubs: Stubs) -> None:
    stubs.answer("^xpk", 7)
    done = stubs.run("launch/xpk.sh", *OPTIONS, **XPK, XPK_FLAGS="--project=p --zone=z")
    assert done.returncode == 7, done.stderr
    (call,) = stubs.calls
    assert call[:3] == ["xpk", "workload", "create"]
    assert {
        "--cluster=c", "--workload=branchnorm", "--tpu-type=v6e-16", "--docker-image=image:tpu", "--num-slices=1",
        "--max-restarts=50", "--restart-on-exit-codes=4", "--termination-grace-period-seconds=300", "--project=p",
    } < set(call)  # fmt: skip
    command = call[-1].removeprefix("--command=")
    assert shlex.split(command) == ["exec", "python", "main.py", "--config.parallel.distributed=True", *OPTIONS]


def test_xpk_dry_run_prints_and_runs_nothing(stubs: Stubs) -> None:
    done = stubs.run("launch/xpk.sh", "--dry-run", *OPTIONS, **XPK)
    assert done.returncode == 0, done.stderr
    assert shlex.split(done.stdout)[:3] == ["xpk", "workload", "create"]
    assert stubs.calls == []
    assert stubs.run("launch/xpk.sh", **XPK).returncode == 2
