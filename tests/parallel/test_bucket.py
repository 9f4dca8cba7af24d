"""Workdirs and text in a bucket, against a local server. Fast tests use one process and no training."""

import gzip
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from branchnorm_jax.data import corpus
from branchnorm_jax.errors import BranchNormError, StorageError, UserError
from branchnorm_jax.files import atomic_directory
from branchnorm_jax.options import Config, DataConfig
from branchnorm_jax.training.trained import find_run
from branchnorm_jax.workdir import Workdir
from tests.conftest import HASTY, ROOT, kill_when, read_metrics, run_main, start_main
from tests.parallel.processes import run_hosts

pytest.importorskip("gcsfs", reason="the packages of the extra [gs] are not installed")

from tests.cases import quick_and_slow
from tests.parallel.fake_bucket import NAME, FakeBucket

OPTIONS = (*HASTY, "--config.train.steps=40", "--config.train.eval_every=20", "--config.train.checkpoint_every=10")


@pytest.fixture(scope="module")
def server() -> Iterator[FakeBucket]:
    """The server. The libraries of all processes use it in place of Google's."""
    server = FakeBucket()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", server.url)
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", server.url)
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        yield server
    server.shutdown()


@pytest.fixture
def bucket(server: FakeBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeBucket:
    """The empty bucket, and a folder of its own for the local copies."""
    server.objects.clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return server


def opened(name: str = "run") -> Workdir:
    return Workdir.open(f"gs://{NAME}/{name}")


def test_files_are_published_and_fetched(bucket: FakeBucket) -> None:
    workdir = opened()
    (workdir / "log").write_text("1\n")
    (workdir / "vocabulary").mkdir()
    (workdir / "vocabulary" / "model").write_text("pieces")
    workdir.publish()
    assert {name: bucket.text(name) for name in bucket.objects} == {"run/log": "1\n", "run/vocabulary/model": "pieces"}
    other = opened()
    assert other.path != workdir.path, "two processes never share a local copy"
    assert (other / "log").read_text() == "1\n"
    with (workdir / "log").open("a") as file:
        file.write("2\n")
    (workdir / "vocabulary" / "model").unlink()
    generation = bucket.objects["run/log"].generation
    workdir.publish()
    assert (bucket.text("run/log"), sorted(bucket.objects)) == ("1\n2\n", ["run/log"])
    assert bucket.objects["run/log"].generation > generation
    other.fetch(".")
    assert (other / "log").read_text() == "1\n2\n"


def test_unchanged_files_are_neither_uploaded_nor_fetched_again(bucket: FakeBucket) -> None:
    workdir = opened()
    (workdir / "corpus").mkdir()
    (workdir / "corpus" / "tokens").write_text("1 2 3")
    workdir.fetch("corpus")
    workdir.publish()
    stored = dict(bucket.objects)
    workdir.publish()
    assert bucket.objects == stored
    inode, path = (workdir / "corpus" / "tokens").stat().st_ino, workdir.path
    del workdir
    again = opened()
    assert again.path == path, "the next process on this machine finds the token store"
    again.fetch("corpus")
    assert (again / "corpus" / "tokens").stat().st_ino == inode
    again.publish()
    assert bucket.objects == stored


def test_no_file_is_written_outside_of_the_local_copy(bucket: FakeBucket, tmp_path: Path) -> None:
    workdir = opened()
    (workdir / "log").write_text("1\n")
    workdir.publish()
    bucket.objects["run/a/../../../../../escaped"] = bucket.objects["run/log"]
    with pytest.raises(UserError, match=r"contains a/(\.\./)+escaped, which would be outside"):
        opened()
    assert not list(tmp_path.parent.rglob("escaped"))


def test_only_what_is_needed_is_fetched(bucket: FakeBucket) -> None:
    workdir = opened()
    for name in ("corpus/train", "tensorboard", "export", "average", "compile_cache", "vocabulary"):
        (workdir / name).mkdir(parents=True)
        (workdir / name / "file").write_text(name)
    (workdir / "status.json").write_text("{}")
    workdir.fetch("corpus")
    workdir.publish()
    assert "run/compile_cache/file" not in bucket.objects
    assert "run/corpus/train/file" in bucket.objects
    other = opened()
    assert {path.name for path in other.path.iterdir() if path.name[0] != "."} == {"vocabulary", "status.json"}
    other.fetch("corpus")
    other.fetch("average")
    assert (other / "corpus" / "train" / "file").exists() and (other / "average" / "file").exists()
    # What was not fetched is not deleted either.
    other.publish()
    assert "run/tensorboard/file" in bucket.objects


def test_old_local_copies_are_not_revived(bucket: FakeBucket) -> None:
    workdir = opened()
    (workdir / "metrics.jsonl").write_text("{}\n")
    workdir.publish()
    path = workdir.path
    del workdir
    bucket.objects.clear()
    again = opened()
    again.publish()
    assert again.path == path
    assert not (again / "metrics.jsonl").exists() and not bucket.objects


def test_files_that_another_process_deleted_are_deleted_here(bucket: FakeBucket) -> None:
    """Process 0 replaces a shared vocabulary by two, and the others load what they see."""
    first = opened()
    (first / "vocabulary").mkdir()
    (first / "vocabulary" / "vocab.model").write_text("shared")
    first.publish()
    other = opened()
    (first / "vocabulary" / "vocab.model").rename(first / "vocabulary" / "source.model")
    first.publish()
    other.fetch(".")
    assert [path.name for path in (other / "vocabulary").iterdir()] == ["source.model"]
    assert (other / "vocabulary" / "source.model").read_text() == "shared"


def test_new_average_replaces_the_old_one(bucket: FakeBucket) -> None:
    """As --mode=average does: the folder is fetched before it is replaced."""
    for step in ("200", "100"):
        workdir = opened()
        workdir.fetch("average")
        with atomic_directory(workdir / "average") as folder:
            (folder / step).mkdir()
            (folder / step / "params").write_text(step)
        workdir.publish()
    assert list(bucket.objects) == ["run/average/100/params"]


def test_lines_added_during_an_upload_are_uploaded_next_time(
    bucket: FakeBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    workdir = opened()
    log = workdir / "log"
    log.write_text("1\n")
    put = bucket.put

    def append(name: str, content: bytes) -> None:
        with log.open("a") as file:
            file.write("2\n")
        put(name, content)

    monkeypatch.setattr(bucket, "put", append)
    workdir.publish()
    monkeypatch.setattr(bucket, "put", put)
    assert bucket.text("run/log") == "1\n"
    workdir.publish()
    assert bucket.text("run/log") == "1\n2\n"


def test_leftovers_and_folders_made_by_hand_are_ignored(bucket: FakeBucket) -> None:
    bucket.put("run/", b"")
    bucket.put("run/corpus/", b"")
    workdir = opened()
    workdir.fetch("corpus")
    (workdir / "corpus" / ".train.12ab.tmp").mkdir(parents=True)
    (workdir / "corpus" / ".train.12ab.tmp" / "tokens").write_text("1")
    (workdir / ".lock").touch()
    workdir.publish()
    assert list(bucket.objects) == ["run/", "run/corpus/"]


def test_unwritable_cache_is_reported(bucket: FakeBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match=rf"gs://{NAME}/run: no folder for the local copy .*; set XDG_CACHE_HOME to a"):
        opened()


def test_process_that_was_replaced_ends(bucket: FakeBucket) -> None:
    first, second = opened(), opened()
    first.set_mark("first")
    first.publish()
    second.check_mark("first")
    second.set_mark("second")
    (first / "status.json").write_text("{}")
    with pytest.raises(UserError, match=f"gs://{NAME}/run: another process has started to train in this workdir"):
        first.publish()
    assert "run/status.json" not in bucket.objects
    second.publish()


@pytest.mark.parametrize(("status", "code"), [(400, 4), (403, 5)])
def test_failing_bucket_gives_one_line(
    bucket: FakeBucket, status: int, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Another start makes sense after an error, but not if access is denied."""
    workdir = opened()
    (workdir / "log").write_text("1\n")
    bucket.broken = status
    try:
        with pytest.raises(StorageError, match=f"^gs://{NAME}/run: cannot be written ") as failed:
            workdir.publish()
        with pytest.raises(BranchNormError, match=f"^gs://{NAME}/other: cannot be read ") as unopened:
            opened("other")
    finally:
        bucket.broken = 0
    assert failed.value.exit_code == code
    assert unopened.value.exit_code == (2 if code == 5 else code)
    assert capfd.readouterr() == ("", "")


def test_unknown_schemes_are_rejected() -> None:
    with pytest.raises(UserError, match=r"^ftp://host/run: a workdir is a folder or begins with gs://"):
        Workdir.open("ftp://host/run")
    for url in ("gs://", "gs://bucket", "gs://bucket/", "gs:///run"):
        with pytest.raises(UserError, match=f"^{url}: name a folder in a bucket"):
            Workdir.open(url)
    with pytest.raises(UserError, match=r"^nowhere://host/text: Protocol not known"):
        list(corpus.read_pairs(DataConfig(source="text", path="nowhere://host/text"), "train"))


def test_options_name_checkpoints_of_runs_in_buckets(bucket: FakeBucket) -> None:
    for name in (f"gs://{NAME}/run", f"gs://{NAME}/run:last"):
        with pytest.raises(UserError, match=f"gs://{NAME}/run: no training run in this folder"):
            find_run("decode.ensemble", name, Config())


@pytest.mark.parametrize("scheme", quick_and_slow(["memory", "gs"], ["memory"]))
def test_text_can_be_in_a_bucket(bucket: FakeBucket, scheme: str) -> None:
    import fsspec

    root = f"{scheme}://{NAME}/text"
    texts = {"train.en": b"one\ntwo\n", "train.de.gz": gzip.compress(b"eins\nzwei\n"), "more/train.x.fr": b"un\n"}
    for name, content in texts.items():
        with fsspec.open(f"{root}/{name}", "wb") as file:
            file.write(content)
    config = DataConfig(source="text", path=root, source_lang="en", target_lang="de", files="{split}.{lang}")
    assert list(corpus.read_pairs(config, "train")) == [("one", "eins"), ("two", "zwei")]
    key = corpus.corpus_key(config, "train")
    assert corpus.corpus_key(config, "train") == key
    with fsspec.open(f"{root}/train.en", "wb") as file:
        file.write(b"1\n2\n")
    assert corpus.corpus_key(config, "train") != key
    with pytest.raises(UserError, match=rf"{root}: no file matches valid.en .*; the folder contains more, train.de.gz"):
        list(corpus.read_pairs(config, "valid"))
    with pytest.raises(UserError, match=f"data.path={root}/none: no such folder"):
        list(corpus.read_pairs(DataConfig(source="text", path=f"{root}/none"), "train"))


def steps(bucket: FakeBucket) -> list[int]:
    return sorted(
        int(name.split("/")[2]) for name in list(bucket.objects) if name.endswith("/params/commit_success.txt")
    )


def logged(bucket: FakeBucket) -> list[float]:
    return [json.loads(line)["loss"] for line in bucket.text("run/metrics.jsonl").splitlines()]


@pytest.mark.slow
def test_run_in_a_bucket_equals_a_run_in_a_folder(
    bucket: FakeBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trains, dies, resumes on a machine without local copies, evaluates, averages and translates."""
    folder, url = tmp_path / "run", f"gs://{NAME}/run"
    assert run_main(*OPTIONS, f"--workdir={folder}").returncode == 0
    before = set(ROOT.iterdir())
    process = start_main(*OPTIONS, f"--workdir={url}")
    kill_when(process, lambda: 20 in steps(bucket), signal.SIGKILL)
    process.communicate()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
    resumed = run_main(*OPTIONS, f"--workdir={url}")
    assert resumed.returncode == 0, resumed.stderr
    assert "tokens reused" in resumed.stderr
    assert "training a vocabulary" not in resumed.stderr
    assert logged(bucket) == [line["loss"] for line in read_metrics(folder)]
    theirs, ours = json.loads((folder / "status.json").read_text()), json.loads(bucket.text("run/status.json"))
    assert theirs["state_sha256"] == ours["state_sha256"]

    for workdir in (str(folder), url):
        for mode in ("evaluate", "average"):
            done = run_main(f"--mode={mode}", f"--workdir={workdir}", "--config.average.checkpoints=last:2")
            assert done.returncode == 0, done.stderr
    assert (
        json.loads(bucket.text("run/results.json"))["test"] == json.loads((folder / "results.json").read_text())["test"]
    )
    outputs = [
        run_main("--mode=translate", f"--workdir={workdir}", "--config.decode.checkpoint=average", stdin="one\ntwo\n")
        for workdir in (str(folder), url)
    ]
    assert outputs[0].returncode == outputs[1].returncode == 0, outputs[1].stderr
    assert outputs[0].stdout == outputs[1].stdout
    assert set(ROOT.iterdir()) == before
    assert {path.name for path in tmp_path.iterdir()} == {"run", "cache", "another machine"}


@pytest.mark.slow
def test_processes_share_a_workdir_in_a_bucket(bucket: FakeBucket, tmp_path: Path) -> None:
    options = (*OPTIONS, "--config.train.steps=20", "--config.parallel.fsdp=2")
    code, output = run_hosts(*options, f"--workdir=gs://{NAME}/run")
    assert code == 0, output
    assert output.count("training a vocabulary") == 1
    assert run_main(*options, f"--workdir={tmp_path / 'alone'}", devices=4).returncode == 0
    assert logged(bucket) == pytest.approx([line["loss"] for line in read_metrics(tmp_path / "alone")], rel=1e-5)
    resumed = run_main(*options, f"--workdir=gs://{NAME}/run", "--config.train.steps=25", devices=2)
    assert resumed.returncode == 0, resumed.stderr
    assert "training from step 20 to 25" in resumed.stderr
