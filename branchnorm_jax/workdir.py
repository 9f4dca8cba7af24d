"""The folder of one run: paths of its files, and checks that they match the current config and data."""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from branchnorm_jax import config as configs
from branchnorm_jax.errors import UserError
from branchnorm_jax.files import lock, write_atomically
from branchnorm_jax.options import Config


@dataclasses.dataclass(frozen=True)
class Workdir:
    """Paths of a run's files.

    config.json, status.json, metrics.jsonl, layers.jsonl, validation.jsonl, events.jsonl, results.json; vocabulary/,
    corpus/, checkpoints/, evaluation/, average/, export/, tensorboard/, compile_cache/.
    """

    path: Path

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def create(self) -> None:
        """Creates the folder. Raises `UserError` if it cannot be created or written to."""
        if re.match("[a-z][a-z0-9+.-]+:/", str(self.path)):
            raise UserError(
                f"{self.path}: --workdir must be a folder, not a URL; mount the bucket or share on every host and give "
                "the folder"
            )
        probe = self.path / f".probe.{os.getpid()}"
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
        for name in ("checkpoints", "vocabulary", "corpus", "evaluation"):
            if (self / name).exists() and not (self / name).is_dir():
                raise UserError(f"{self / name}: this must be a folder; move the file away")

    @property
    def last_step(self) -> int:
        """Step of the newest finished checkpoint; -1 if there is none."""
        folder = self / "checkpoints"
        entries = folder.iterdir() if folder.is_dir() else ()
        return max((int(entry.name) for entry in entries if entry.name.isdecimal()), default=-1)

    @property
    def has_checkpoints(self) -> bool:
        """Whether the run has a finished checkpoint."""
        return self.last_step >= 0

    def need_space(self, needed: int) -> None:
        """Raises `UserError` unless `needed` bytes are free."""
        free = shutil.disk_usage(self.path).free
        if free < needed:
            raise UserError(
                f"{self.path}: {free / 1e9:.2f} GB are free and the checkpoints need {needed / 1e9:.2f} GB; free some "
                f"space, lower train.keep_last, or choose another --workdir"
            )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the workdir during training. Raises `UserError` if another process has locked it."""
        with (self.path / ".lock").open("w") as file:
            lock(file, f"{self.path}: another process is training in this workdir")
            yield

    def check_mark(self, mark: str) -> None:
        """Raises `UserError` unless the file .run contains `mark`, which another process wrote at its start."""
        path = self / ".run"
        for _ in range(20):  # Network file systems may show a new file late.
            if path.exists() and path.read_text() == mark:
                return
            time.sleep(0.5)
        raise UserError(
            f"{self.path.absolute()} on {socket.gethostname()} is not the workdir of process 0; --workdir must be a "
            "folder that all processes share"
        )

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
                    f"choose another --workdir or go back to the old values"
                )

    def agree_on_config(self, config: Config) -> None:
        """Checks the config against the saved config of the run, then saves it.

        Before the first checkpoint any config is accepted, because the run starts over and loses nothing.

        Raises:
          UserError: if the configs differ, or if `train.steps` is below the step of the run.
        """
        if not self.has_checkpoints:
            path = self / "config.json"
            if path.exists() and configs.difference(configs.load(path), config, free=False):
                (self / "events.jsonl").unlink(missing_ok=True)
            for name in ("data.json", "metrics.jsonl", "layers.jsonl", "validation.jsonl"):
                (self / name).unlink(missing_ok=True)
        else:
            self.check_config(config)
            if 0 < config.train.steps < self.last_step:
                raise UserError(
                    f"{self.path}: this run is at step {self.last_step}, past train.steps={config.train.steps}; "
                    "raise train.steps or choose another --workdir"
                )
        write_atomically(self / "config.json", configs.to_json(config))

    def agree_on_data(self, identity: dict[str, str]) -> None:
        """Checks the training data against the saved hashes of the run, then saves the hashes.

        Args:
          identity: name -> hash, for the corpus and the vocabulary.

        Raises:
          UserError: if a hash changed, or the saved hashes cannot be read.
        """
        path = self / "data.json"
        if path.exists():
            known = self.data_identity()
            changed = [
                f"{name}: {known.get(name, 'none')[:12]} -> {value[:12]}"
                for name, value in identity.items()
                if known.get(name) != value
            ]
            if changed:
                raise UserError(
                    f"{self.path}: the data of this run changed ({'; '.join(changed)}); restore the old files or "
                    f"choose another --workdir"
                )
        write_atomically(path, json.dumps(identity, indent=2) + "\n")

    def data_identity(self) -> dict[str, str]:
        """Returns the hashes that `agree_on_data` saved. Raises `UserError` if they are missing or broken."""
        path = self / "data.json"
        try:
            known = json.loads(path.read_text())
            return {str(name): str(value) for name, value in known.items()}
        except (OSError, ValueError, AttributeError) as error:
            raise UserError(
                f"{path}: cannot read the hashes of this run's data ({error}); if text and vocabulary have not "
                f"changed, delete the file and resume training, which then accepts them unchecked"
            ) from error
