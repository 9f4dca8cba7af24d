"""Models with a pickle in them that would create a file: the import refuses them in one line, and runs nothing."""

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from branchnorm_jax.errors import UserError
from branchnorm_jax.importing import fairseq, marian, marian_npz
from tests.conftest import run_main
from tests.importing import examples

HARM = Path("harm")


class Harmful:
    """Creates a file when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (HARM,)


YAML = "!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path [harm]]"


def saved_by_torch(name: str) -> Callable[[Path], None]:
    """Returns a function that writes a file of torch, a zip archive with the pickle in it."""
    return lambda folder: torch.save({"model": Harmful()}, folder / name)


def without_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"model.shared.weight": Harmful()}, folder / "pytorch_model.bin")


def array_of_objects(folder: Path) -> None:
    with np.load(folder / "model.npz") as file:
        arrays = dict(file)
    np.savez(folder / "model.npz", **arrays | {"encoder_l1_ffn_W1": np.array([Harmful()], dtype=object)})


def options_with_object(folder: Path) -> None:
    with np.load(folder / "model.npz") as file:
        arrays = dict(file)
    text = np.frombuffer(f"dim-emb: {YAML}\n".encode() + b"\0", np.int8)
    np.savez(folder / "model.npz", **arrays | {"special:model.yml": text})


def pickled(name: str) -> Callable[[Path], Any]:
    """Returns a function that replaces a file by a pickle."""
    return lambda folder: (folder / name).write_bytes(pickle.dumps(Harmful()))


def text(name: str, content: str) -> Callable[[Path], Any]:
    """Returns a function that writes a text file."""
    return lambda folder: (folder / name).write_text(content)


READ: dict[str, tuple[Callable[..., Any], Callable[[Path], Any]]] = {
    "Hugging Face": (examples.marian, marian.read_folder),
    "fairseq": (examples.fairseq, fairseq.read_folder),
    "Marian": (examples.marian_npz, marian_npz.read_folder),
}

HOSTILE: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "torch, in a zip": ("Hugging Face", without_safetensors, "pytorch_model.bin: cannot be read as plain weights"),
    "SentencePiece": ("Hugging Face", pickled("source.spm"), "source.spm"),
    "safetensors": ("Hugging Face", pickled("model.safetensors"), "model.safetensors: cannot be read"),
    "vocab.json": ("Hugging Face", pickled("vocab.json"), "vocab.json: cannot be read"),
    "checkpoint": ("fairseq", saved_by_torch("checkpoint_best.pt"), "checkpoint_best.pt: cannot be read as plain"),
    "dictionary": ("fairseq", pickled("dict.en.txt"), "dict.en.txt, line 1: not valid UTF-8"),
    "spm.model": ("fairseq", pickled("spm.model"), "spm.model"),
    "a date that there is not": ("Marian", text("decoder.yml", "trained: 2024-02-31"), "decoder.yml: not valid YAML"),
    "array of objects": ("Marian", array_of_objects, "model.npz: cannot be read"),
    "npz that is a pickle": ("Marian", pickled("model.npz"), "model.npz: cannot be read"),
    "options with an object": ("Marian", options_with_object, "model.npz: not valid YAML"),
    "decoder.yml": ("Marian", text("decoder.yml", f"models: {YAML}"), "decoder.yml: not valid YAML"),
    "vocabulary with an object": ("Marian", text("both.vocab.yml", f"a: {YAML}"), "an id is not a whole number"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp("intact") / "model" for name in READ}
    for name, (make, _) in READ.items():
        made[name].mkdir(exist_ok=True)
        make(made[name])
    return made


@pytest.mark.parametrize(("kind", "damage", "message"), HOSTILE.values(), ids=list(HOSTILE))
def test_hostile_files(
    kind: str,
    damage: Callable[[Path], Any],
    message: str,
    folders: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "model"
    shutil.copytree(folders[kind], folder)
    damage(folder)
    with pytest.raises(UserError) as raised:
        READ[kind][1](folder)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not HARM.exists()


def test_the_payload_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickle.dumps(Harmful()))
    assert HARM.exists()


def test_the_command_refuses_in_one_line(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = folders["Hugging Face"]
    without_safetensors(folder)
    done = run_main("--mode=import", f"--config.import.path={folder}", f"--workdir={tmp_path / 'run'}")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "cannot be read as plain weights" in done.stderr
    assert not list(tmp_path.rglob("harm")) and not HARM.exists()
