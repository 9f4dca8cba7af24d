"""The folder of one run: paths of its files, and checks that they match the current config and data."""

import contextlib
import dataclasses
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from etils import epath

from branchnorm_jax import config as configs
from branchnorm_jax.bucket import MARK, Bucket, is_url
from branchnorm_jax.errors import BranchNormError, StorageError, UserError, some
from branchnorm_jax.files import lock, write_atomically
from branchnorm_jax.options import Config


@dataclasses.dataclass(frozen=True)
class Workdir:
    """Paths of a run's files.

    config.json, import.json, status.json, metrics.jsonl, layers.jsonl, validation.jsonl, events.jsonl, results.json;
    vocabulary/, corpus/, checkpoints/, evaluation/, average/, export/, tensorboard/, compile_cache/.

    Attributes:
      path: the folder. If the workdir is in a bucket, its local copy.
      bucket: the bucket, or None.
    """

    path: Path
    bucket: Bucket | None = None

    @classmethod
    def open(cls, name: str) -> "Workdir":
        """Returns the workdir with this path or URL.

        Raises:
          UserError: if it is a URL that cannot be read, or if its name cannot be written in UTF-8.
        """
        try:
            os.path.abspath(name).encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"{name}: the name of this folder, or of one above it, is not UTF-8, which checkpoints need; rename it"
            ) from error
        if not is_url(name):
            return cls(Path(name))
        bucket = Bucket(name)
        return cls(bucket.folder, bucket)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def child(self, name: str) -> "Workdir":
        """Returns the workdir of a run of this sweep."""
        return dataclasses.replace(self, path=self.path / name)

    def stored(self, name: str) -> epath.Path:
        """Returns the path of a file or folder in the bucket, if any, and otherwise in the folder."""
        path = self.path.absolute() / name
        if not self.bucket:
            return epath.Path(path)
        return epath.Path(self.bucket.url, path.relative_to(self.bucket.folder).as_posix())

    def publish(self) -> None:
        """Uploads what has changed to the bucket, if any; see `Bucket.publish`."""
        if self.bucket:
            self.bucket.publish()

    @contextlib.contextmanager
    def published(self) -> Iterator[None]:
        """Uploads at the end of the context, also after an error."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(BranchNormError, OSError):
                self.publish()
            raise
        self.publish()

    def create(self) -> None:
        """Creates the folder of a run. Raises `UserError` if it cannot be used for one."""
        self.make()
        for name in ("checkpoints", "vocabulary", "corpus", "evaluation"):
            if (self / name).exists() and not (self / name).is_dir():
                raise UserError(f"{self / name}: this must be a folder; move the file away")

    def make(self) -> None:
        """Creates the folder. Raises `UserError` if it cannot be created or written to."""
        if os.path.lexists(self.path) and not self.path.is_dir():
            raise UserError(f"{self.path}: this is a file, or a link that leads to no folder; choose another --workdir")
        probe = self.path / ".probe"  # always the same file, so that a killed process leaves at most one
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"\0" * 4096)
        except OSError as error:
            raise UserError(
                f"{self.path}: cannot write in this workdir ({error.strerror}); choose another --workdir"
            ) from error
        finally:
            with contextlib.suppress(OSError):
                probe.unlink()

    @property
    def last_step(self) -> int:
        """Step of the newest finished checkpoint; -1 if there is none."""
        folder = self.stored("checkpoints")
        entries = folder.iterdir() if folder.is_dir() else ()
        steps = (entry for entry in entries if entry.name.isdecimal())
        # Buckets cannot rename folders. There, this file is the last one of a checkpoint.
        finished = (step for step in steps if not self.bucket or (step / "commit_success.txt").exists())
        return max((int(step.name) for step in finished), default=-1)

    @property
    def has_checkpoints(self) -> bool:
        """Whether the run has a finished checkpoint."""
        return self.last_step >= 0

    def need_space(self, needed: int) -> None:
        """Raises `UserError` unless `needed` bytes are free. Buckets have no limit."""
        if self.bucket:
            return
        free = shutil.disk_usage(self.path).free
        if free < needed:
            raise UserError(
                f"{self.path}: {free / 1e9:.2f} GB are free and the checkpoints need {needed / 1e9:.2f} GB; free some "
                f"space, lower train.keep_last, or choose another --workdir"
            )

    @contextlib.contextmanager
    def locked(self, wait: bool = False) -> Iterator[None]:
        """Locks the workdir. Raises `UserError` if another process has locked it and this one does not `wait`."""
        with (self.path / ".lock").open("w") as file:
            lock(file, f"{self.path}: another process is training in this workdir", wait)
            yield

    @contextlib.contextmanager
    def evaluated(self, say: Callable[[str], None]) -> Iterator[None]:
        """Locks the scores and their texts. If another process has locked them, says so and waits.

        A bucket cannot be locked.
        """
        with (self.path / ".evaluated").open("w") as file:
            try:
                lock(file, f"{self.path}: another process is evaluating this run; waiting until it has ended")
            except UserError as held:
                say(str(held))
                lock(file, "", wait=True)
            yield

    @contextlib.contextmanager
    def claimed(self) -> Iterator[bool]:
        """Claims this run of a sweep, from its training to its scores; False if another process has claimed it."""
        self.make()
        with (self.path / ".claim").open("w") as file:
            try:
                lock(file, "")
            except UserError:
                ours = False
            else:
                ours = True
            yield ours

    def fetch(self, name: str) -> None:
        """Fetches a folder that is not fetched by itself ("corpus", "average", "export/...") from the bucket, if any.

        "." fetches again what has changed in the others.
        """
        if self.bucket:
            self.bucket.fetch(self / name)

    def set_mark(self, mark: str) -> None:
        """Writes `mark`, which identifies this start of the run.

        In a bucket, where nothing can be locked, an earlier process that still trains notices the new mark and ends.
        """
        if self.bucket:
            self.bucket.set_mark(self.path, mark)
        else:
            write_atomically(self / MARK, mark)

    def check_mark(self, mark: str) -> None:
        """Raises `UserError` unless the workdir has this `mark`, which process 0 wrote at its start."""
        path = self.stored(MARK)
        for _ in range(20):  # Network file systems may show a new file late.
            if path.exists() and path.read_text() == mark:
                return
            time.sleep(0.5)
        raise UserError(
            f"{path.parent} on {socket.gethostname()} is not the workdir of process 0; --workdir must be a "
            "folder that all processes share"
        )

    def is_lost(self, mark: str) -> bool:
        """Returns whether the folder no longer has `mark`, which this process wrote when it started.

        The folder was deleted or moved, or another process trains in it, because its lock was deleted or the file
        system has no locks. Always False in a bucket, where `publish` checks the mark.
        """
        if self.bucket:
            return False
        try:
            return (self / MARK).read_text() != mark
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # It says nothing about the mark.
            return False

    def check_config(self, config: Config) -> None:
        """Raises `UserError` that lists the differences if the run has another config.

        Options that do not affect the trained parameters may differ. A workdir without a config is a new run.
        """
        path = self / "config.json"
        if path.exists():
            changed = configs.difference(configs.load(path), config, free=False)
            if changed:
                raise UserError(
                    f"{self.path}: this workdir was made with another config ({'; '.join(changed)}); "
                    "choose another --workdir, or go back to the old values: without --config the run uses its own"
                )

    def check_resumes(self, config: Config) -> None:
        """Raises `UserError` if the run cannot go on with the config: it differs, or the run is past `train.steps`."""
        self.check_config(config)
        if 0 < config.train.steps < self.last_step:
            raise UserError(
                f"{self.path}: this run is at step {self.last_step}, past train.steps={config.train.steps}; "
                "raise train.steps or choose another --workdir"
            )

    def agree_on_config(self, config: Config) -> None:
        """Checks the config against the saved config of the run.

        Before the first checkpoint any config is accepted and saved, because the run starts over and loses nothing.
        Later, `agree_on_data` saves it.

        Raises:
          UserError: if the configs differ, or if `train.steps` is below the step of the run.
        """
        if not self.has_checkpoints:
            path = self / "config.json"
            saved = configs.load(path) if path.exists() else config
            if saved.sweep.grid and not config.sweep.grid:
                raise UserError(
                    f"{self.path}: this is the folder of a sweep; add --mode=sweep or choose another --workdir"
                )
            if configs.difference(saved, config, free=False):
                (self / "events.jsonl").unlink(missing_ok=True)
            for name in ("data.json", "metrics.jsonl", "layers.jsonl", "validation.jsonl"):
                (self / name).unlink(missing_ok=True)
        else:
            if (self / "import.json").exists():
                raise UserError(
                    f"{self.path}: this model was imported and has no optimiser state; fine-tune it in another "
                    f"--workdir with --config.train.finetune_from={self.path}"
                )
            self.check_resumes(config)
            return
        write_atomically(self / "config.json", configs.to_json(config))

    def agree_on_data(self, identity: dict[str, str], reports: Mapping[str, Any], config: Config) -> None:
        """Checks the training data against the saved hashes of the run, then saves hashes, reports and the config.

        Args:
          identity: name -> hash, for the corpus and the vocabulary.
          reports: the faults of the text, see `data.prepare.Corpus`.
          config: the config of the run.

        Raises:
          UserError: if a hash changed, or the saved hashes cannot be read.
        """
        if (self / "data.json").exists():
            self.check_data(identity)
        content = json.dumps({**identity, "reports": reports}, indent=2, ensure_ascii=False)
        write_atomically(self / "data.json", content + "\n")
        write_atomically(self / "config.json", configs.to_json(config))

    def check_data(self, identity: Mapping[str, str]) -> None:
        """Raises `UserError` if the saved hashes differ from `identity`, or cannot be read."""
        known = self.data_identity()
        changed = [name for name, value in identity.items() if known.get(name) != value]
        if changed:
            raise UserError(
                f"{self / 'data.json'}: the data of this run changed ({some(changed)}); restore the old files, or "
                f"start a new run in another --workdir with --config.train.finetune_from={self.path}. If the files are "
                f"the old ones, data.json is damaged: restore it, or delete it and resume training, which writes it"
            )

    def data_identity(self) -> dict[str, str]:
        """Returns the hashes that `agree_on_data` saved.

        Raises:
          UserError: if they are missing or broken.
          StorageError: if they may be intact but cannot be read.
        """
        path = self / "data.json"
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
            return {str(name): str(value) for name, value in known.items() if name != "reports"}
        except (FileNotFoundError, ValueError, AttributeError) as error:
            raise UserError(
                f"{path}: cannot read the hashes of this run's data ({error}); if text and vocabulary have not "
                f"changed, delete the file and resume training, which then accepts them unchecked"
            ) from error
        except OSError as error:
            raise StorageError(f"{path}: {error.strerror}") from error


def runs_near(folder: Path, where: str = "near it") -> str:
    """Returns "; runs near it: ..." with the trained runs beside a folder and in it, or "" if there are none."""
    found = [path.parent for place in (folder.parent, folder) for path in sorted(place.glob("*/config.json"))]
    found = [path for path in found if any((path / "checkpoints").glob("[0-9]*"))]
    return f"; runs {where}: {some([str(path) for path in found], 8)}" if found else ""
