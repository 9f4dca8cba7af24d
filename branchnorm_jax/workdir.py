"""The folder of one run: where its files lie, and whether what lies there fits what is asked now."""

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from branchnorm_jax import config as configs
from branchnorm_jax.config import Config
from branchnorm_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Workdir:
    """Paths of a run's files.

    config.json, status.json, metrics.jsonl, validation.jsonl, results.json; vocabulary/, corpus/, checkpoints/,
    evaluation/, tensorboard/, compile_cache/.
    """

    path: Path

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def create(self) -> None:
        """Makes the folder. Raises `UserError` if it cannot be made or written to."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".probe.{os.getpid()}"
            probe.write_bytes(b"\0" * 65536)
            probe.unlink()
        except OSError as error:
            raise UserError(
                f"{self.path}: cannot write in this workdir ({error.strerror}); choose another --workdir"
            ) from error

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
        """Holds the workdir against a second training. Raises `UserError` if another process holds it."""
        with (self.path / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise UserError(f"{self.path}: another process is training in this workdir") from error
            yield

    def check_config(self, config: Config) -> None:
        """Raises `UserError` with the differences if the run was made with another config.

        Options that no trained number depends on may differ. A workdir without a config is a new run.
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
        """Checks the config against that of the run so far, then saves it."""
        self.check_config(config)
        configs.save(config, self / "config.json")

    def agree_on_data(self, identity: dict[str, str]) -> None:
        """The same for what the run learns from: hashes of corpus and vocabulary by name."""
        path = self / "data.json"
        if path.exists():
            known = json.loads(path.read_text())
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
        path.write_text(json.dumps(identity, indent=2) + "\n")
