"""The JobSet manifests and the Dockerfile.

JobSet's schema is part of no package of the lock file, so `FIELDS` lists the fields that a manifest may use.
test_exit_codes.py checks the failure policies.
"""

import fnmatch
import math
import re
import subprocess
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT

LAUNCH = ROOT / "launch"

CONTAINER = {
    "name": str, "image": str, "command": list, "args": list,
    "env": [{"name": str, "value": str, "valueFrom": {"fieldRef": {"fieldPath": str}}}],
    "securityContext": {"privileged": bool, "runAsUser": int},
    "ports": [{"containerPort": int}],
    "resources": {"limits": dict},
    "volumeMounts": [{"name": str, "mountPath": str}],
}  # fmt: skip
POD = {
    "securityContext": {"fsGroup": int},
    "restartPolicy": str, "terminationGracePeriodSeconds": int, "nodeSelector": dict, "containers": [CONTAINER],
    "volumes": [{"name": str, "emptyDir": {"medium": str}, "persistentVolumeClaim": {"claimName": str}}],
}  # fmt: skip
FAIL_JOB = {
    "action": str,
    "onExitCodes": {"containerName": str, "operator": str, "values": list},
    "onPodConditions": [{"type": str, "status": str}],
}
JOB = {
    "completionMode": str, "parallelism": int, "completions": int, "backoffLimit": int,
    "podFailurePolicy": {"rules": [FAIL_JOB]}, "template": {"spec": POD},
}  # fmt: skip
FIELDS = {
    "apiVersion": str, "kind": str, "metadata": {"name": str, "annotations": dict},
    "spec": {
        "coordinator": {"replicatedJob": str},
        "failurePolicy": {
            "maxRestarts": int,
            "rules": [{
                "name": str, "action": str, "onJobFailureReasons": list, "onJobFailureMessagePatterns": list,
            }],
        },
        "replicatedJobs": [{"name": str, "replicas": int, "template": {"spec": JOB}}],
    },
}  # fmt: skip


def check(value: Any, fields: Any, where: str) -> None:
    if isinstance(fields, dict):
        assert isinstance(value, dict), where
        for name, item in value.items():
            assert name in fields, f"{where}.{name}"
            check(item, fields[name], f"{where}.{name}")
    elif isinstance(fields, list):
        assert isinstance(value, list), where
        for item in value:
            check(item, fields[0], where)
    else:
        assert type(value) is fields, where


@pytest.fixture(params=["gke_jobset.yaml", "gke_jobset_gpu.yaml"])
def manifest(request: pytest.FixtureRequest) -> dict[str, Any]:
    return yaml.safe_load((LAUNCH / request.param).read_text())


def parts(manifest: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Returns the spec of the job, of the pod, and of the container."""
    (replicated,) = manifest["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    return job, job["template"]["spec"], container


def test_fields_and_values(manifest: dict[str, Any]) -> None:
    check(manifest, FIELDS, "manifest")
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    job, pod, container = parts(manifest)
    assert (job["completionMode"], job["backoffLimit"], pod["restartPolicy"]) == ("Indexed", 0, "Never")
    assert job["parallelism"] == job["completions"]
    assert pod["terminationGracePeriodSeconds"] >= 120
    assert container["command"] == ["python", "main.py"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert any(argument.startswith(f"--workdir={mounts['shared']}/") for argument in container["args"])
    assert {volume["name"] for volume in pod["volumes"]} == set(mounts)
    for rule in job["podFailurePolicy"]["rules"]:
        if codes := rule.get("onExitCodes"):
            assert codes["containerName"] == container["name"]
            # Kubernetes wants them sorted, without duplicates and, for In, without 0.
            assert codes["values"] == sorted(set(codes["values"]) - {0})
            assert codes["operator"] in ("In", "NotIn")


def test_tpu_variant() -> None:
    job, pod, container = parts(yaml.safe_load((LAUNCH / "gke_jobset.yaml").read_text()))
    topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-accelerator"] == "tpu-v6e-slice"
    chips = container["resources"]["limits"]["google.com/tpu"]
    assert chips * job["parallelism"] == math.prod(map(int, topology.split("x")))
    # GKE sets no variable by which hosts.py would detect a slice.
    assert "--config.parallel.distributed=True" in container["args"]


def test_gpu_variant() -> None:
    manifest = yaml.safe_load((LAUNCH / "gke_jobset_gpu.yaml").read_text())
    job, _, container = parts(manifest)
    assert manifest["spec"]["coordinator"]["replicatedJob"] == manifest["spec"]["replicatedJobs"][0]["name"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    values = {one["name"]: one.get("value") or one["valueFrom"]["fieldRef"]["fieldPath"] for one in container["env"]}
    port = container["ports"][0]["containerPort"]
    assert values == {
        "JAX_PLATFORMS": "cuda,cpu",
        "COORDINATOR": "metadata.annotations['jobset.sigs.k8s.io/coordinator']",
        "JAX_COORDINATOR_ADDRESS": f"$(COORDINATOR):{port}",
        "JAX_NUM_PROCESSES": str(job["parallelism"]),
        "JAX_PROCESS_ID": "metadata.annotations['batch.kubernetes.io/job-completion-index']",
    }
    hosts = (ROOT / "branchnorm_jax" / "parallel" / "hosts.py").read_text()
    assert all(f'"{name}"' in hosts for name in values.keys() - {"COORDINATOR", "JAX_PLATFORMS"})


DOCKERFILE = (LAUNCH / "Dockerfile").read_text()


def test_dockerfile_copies_files_that_exist_and_that_docker_may_read() -> None:
    ignore = [line for line in (LAUNCH / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] not in "#"]
    allowed = [line[1:] for line in ignore if line.startswith("!")]
    assert ignore[0] == "*"
    copied = [source for sources in re.findall(r"^COPY ([^-].*) \S+$", DOCKERFILE, re.M) for source in sources.split()]
    assert copied
    for source in copied:
        assert (ROOT / source).exists(), source
        assert any(fnmatch.fnmatch(source, pattern) for pattern in allowed), source


def test_dockerfile_runs_the_quickstart_without_root() -> None:
    assert re.search(r"^ARG RUN_AS=1000$", DOCKERFILE, re.M) and re.search(r"^USER \${RUN_AS}$", DOCKERFILE, re.M)
    assert DOCKERFILE.rstrip().endswith('CMD ["python", "launch/quickstart.py", "runs/quickstart"]')


@pytest.mark.parametrize(
    ("platform", "extras", "names"),
    [
        ("cpu", "", ["core"]),
        ("cuda13", "", ["core", "gpu"]),
        ("tpu", "serve plots", ["core", "tpu", "serve", "plots"]),
        ("rocm", "", None),
    ],
)
def test_dockerfile_installs_the_locked_packages(platform: str, extras: str, names: list[str] | None) -> None:
    found = re.search(r"^RUN (case (?:.*\\\n)+.*)$", DOCKERFILE, re.M)
    assert found
    script = found[1].replace("\\\n", "").replace("/venv/bin/pip", "printf '%s\\n'").replace("/source", str(ROOT))
    done = subprocess.run(
        ["sh", "-c", script], env={"PLATFORM": platform, "EXTRAS": extras}, text=True, capture_output=True
    )
    if names is None:
        assert done.returncode == 2
        assert "must be cpu, cuda13 or tpu" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    install, *rest = done.stdout.splitlines()
    assert install == "install"
    assert rest[rest.index("--constraint") + 1] == "/dev/stdin"
    files = [rest[index + 1] for index, word in enumerate(rest) if word == "--requirement"]
    assert files == [str(ROOT / "requirements" / f"{name}.txt") for name in names]
    assert all((ROOT / "requirements" / f"{name}.txt").exists() for name in names)
