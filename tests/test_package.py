"""The installed package: contents of the wheel, and errors when an extra is not installed."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import HASTY, ROOT, TINY, read_status

SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]


def requirements(name: str) -> set[str]:
    """Returns the names of the packages in a file of requirements/."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return {name_of(line) for line in lines if line and not line.startswith("#")}


def name_of(requirement: str) -> str:
    """jax[cuda13]>=0.10; extra == "gpu" -> jax[cuda13]."""
    return requirement.split(";")[0].split(">")[0].split("<")[0].split("=")[0].strip()


def test_pyproject_lists_every_folder_of_the_package() -> None:
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "branchnorm_jax").rglob("*.py")}
    folders |= {"branchnorm_jax" / path.parent.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.py")}
    assert set(SETUPTOOLS["packages"]) == {".".join(folder.parts) for folder in folders}


def test_requirements_txt_includes_the_core_and_the_usual_extras() -> None:
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    included = {line.removeprefix("-r requirements/").removesuffix(".txt") for line in lines if line[0] != "#"}
    extras = set(SETUPTOOLS["dynamic"]["optional-dependencies"])
    assert included == {"core"} | extras - {"clean", "gs", "gpu", "tpu", "dev"}


USE = ("core", "serve", "tfds", "plots", "gs")


def locked(name: str) -> dict[str, str]:
    """Returns requirement -> hashes of a lock file. Without a hash pip would install whatever file the index has."""
    text = (ROOT / name).read_text(encoding="utf-8")
    entries = re.findall(r"^(\S+==.*?) \\\n((?: {4}--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", text, re.M)
    assert "".join(f"{line} \\\n{hashes}" for line, hashes in entries) == text
    return dict(entries)


@pytest.mark.parametrize(
    ("lock", "names"), [("requirements-lock.txt", USE), ("requirements-dev-lock.txt", (*USE, "dev"))]
)
def test_lock_has_every_requirement_in_an_allowed_version(lock: str, names: Sequence[str]) -> None:
    """The markers select one version per Python."""
    entries = [Requirement(line) for line in locked(lock)]
    for name in names:
        for line in (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8").splitlines():
            if not line.startswith("#"):
                needed = Requirement(line)
                for python in ("3.11.0", "3.12.0"):
                    where = {"python_full_version": python, "sys_platform": "linux"}
                    versions = [
                        next(iter(each.specifier)).version
                        for each in entries
                        if canonicalize_name(each.name) == canonicalize_name(needed.name)
                        and (each.marker is None or each.marker.evaluate(where))
                    ]
                    assert len(versions) == 1, (line, python, versions)
                    assert needed.specifier.contains(versions[0]), line


def test_locks_agree() -> None:
    use, everything = (
        {(requirement.split(" ")[0], hashes) for requirement, hashes in locked(f"requirements{kind}-lock.txt").items()}
        for kind in ("", "-dev")
    )
    assert use < everything


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Builds the wheel from a copy of the checkout, because building leaves files behind."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE", "requirements", "configs", "branchnorm_jax"):
        subprocess.run(["cp", "-r", ROOT / name, source], check=True)
    options = "--no-deps", "--no-build-isolation", "--wheel-dir", str(built)
    command = [sys.executable, "-m", "pip", "wheel", *options, str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return zipfile.ZipFile(next(built.glob("*.whl")))


@pytest.mark.slow
def test_wheel_contains_only_the_package_and_the_configs(wheel: zipfile.ZipFile) -> None:
    expected = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "branchnorm_jax").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    expected |= {f"branchnorm_jax/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.py")}
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == expected
    page = "branchnorm_jax/serving/page.html"
    assert wheel.read(page) == (ROOT / page).read_bytes()


@pytest.mark.slow
def test_wheel_requires_only_the_core_and_declares_the_extras(wheel: zipfile.ZipFile) -> None:
    text = next(wheel.read(name).decode() for name in wheel.namelist() if name.endswith("METADATA"))
    needed: dict[str, set[str]] = {}
    for line in Parser().parsestr(text).get_all("Requires-Dist", []):
        extra = line.partition("extra == ")[2].strip('"') or "core"
        needed.setdefault(extra, set()).add(name_of(line))
    separate = {name: requirements(name) for name in ("core", "serve", "tfds", "plots", "clean", "gs", "gpu", "tpu")}
    dev = requirements("dev").union(
        requirements("torch"), *(separate[name] for name in ("serve", "tfds", "plots", "gs"))
    )
    assert needed == separate | {"dev": dev}


@pytest.mark.slow
def test_installed_command_finds_configs_by_name_and_by_file(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """Unpacks the wheel as pip does, and runs the command in another folder. The file extends a built-in config."""
    wheel.extractall(tmp_path / "site")
    (tmp_path / "mine.py").write_text(
        "from configs import sweep_depth\n\n\n"
        "def get_config(depth=''):\n"
        "    config = sweep_depth.get_config(depth)\n"
        "    config.model.width = 34\n"
        "    config.model.heads = 2\n"
        "    return config\n"
    )
    code = "from branchnorm_jax.cli import command; command()"
    for config, folder, width in (
        ("numerals:1L-2L", "numerals-1L-2L", 128),
        ("mine.py:1L-2L", "mine-1L-2L", 34),
        ("reproduce/branchnorm_table1:1L-2L", "branchnorm_table1-1L-2L", 512),
    ):
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, "--mode=plan", f"--config={config}", "--config.plan.compile=none"],
            cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "site"), "JAX_PLATFORMS": "cpu"},
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert f"branchnorm 1L-2L, width {width}/" in done.stdout
        assert (tmp_path / "runs" / folder / "plan.json").exists()


def run_without(package: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs the command as if `package` were not installed: Python cannot import a module that is set to None."""
    code = f"import sys; sys.modules[{package!r}] = None; from branchnorm_jax.cli import command; command()"
    return subprocess.run([sys.executable, "-c", code, *options], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("package", "extra", "options"),
    [
        ("uvicorn", "serve", ("--mode=serve",)),
        ("starlette", "serve", ("--mode=serve",)),
        ("matplotlib", "plots", ("--mode=analyze",)),
        ("tensorflow_datasets", "tfds", ("--config.data.source=tfds", "--config.data.path=x/de-en")),
        ("opusfilter", "clean", ("--mode=clean", "--config.clean.filters=x.yaml")),
        ("gcsfs", "gs", ("--mode=translate", "--workdir=gs://bucket/run")),
    ],
)
def test_missing_extras_are_named(package: str, extra: str, options: tuple[str, ...], tmp_path: Path) -> None:
    done = run_without(package, *TINY, f"--workdir={tmp_path}", *options)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert package in last and f"pip install -r requirements/{extra}.txt" in last


@pytest.mark.slow
def test_training_needs_no_extra(tmp_path: Path) -> None:
    done = run_without("tensorboardX", *HASTY, "--config.train.steps=2", f"--workdir={tmp_path}")
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stderr.splitlines() if "requirements/plots.txt" in line]
    assert len(warnings) == 1 and "tensorboard is not written" in warnings[0]
    assert read_status(tmp_path)["status"] == "done"
    assert not (tmp_path / "tensorboard").exists()


def test_git_revision_ignores_other_projects(tmp_path: Path) -> None:
    """The environment with the package may be inside the checkout of another project."""

    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=x", "-c", "user.email=x@example.com", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    def revision() -> str:
        code = "from branchnorm_jax.training.logs import git_revision; print(git_revision())"
        command = [sys.executable, "-P", "-c", code]
        environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "another project")
    shutil.copytree(ROOT / "branchnorm_jax", tmp_path / "site" / "branchnorm_jax")
    assert revision() == "unknown"
    git("add", "site")
    git("commit", "-q", "-m", "a checkout")
    assert revision() == git("rev-parse", "HEAD")
