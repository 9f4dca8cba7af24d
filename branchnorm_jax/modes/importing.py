"""--mode=import: makes a workdir of a model that another toolkit trained."""

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from branchnorm_jax import config as configs
from branchnorm_jax.data.tokenizer import ABSENT, Tokenizer, load_tokenizer
from branchnorm_jax.decoding.translate import Translator
from branchnorm_jax.errors import UserError, some
from branchnorm_jax.export import huggingface
from branchnorm_jax.files import atomic_directory, real, write_atomically
from branchnorm_jax.importing import fairseq, marian, marian_npz, multilingual, t5
from branchnorm_jax.importing.imported import Imported, read_json
from branchnorm_jax.model.coefficients import uniform
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.modes.common import compared, random_sentences
from branchnorm_jax.options import Config, DataConfig, DecodeConfig, TrainConfig
from branchnorm_jax.training import logs
from branchnorm_jax.training.checkpoint import Checkpoints
from branchnorm_jax.training.network import make_model
from branchnorm_jax.workdir import Workdir

FAMILIES = {
    "marian": marian.read_folder,
    **dict.fromkeys(("m2m_100", "mbart"), multilingual.read_folder),
    **dict.fromkeys(("t5", "mt5"), t5.read_folder),
}
"""model_type in config.json -> function that reads the folder."""

FILES = {".npz": ("marian's npz", marian_npz.read_folder), ".pt": ("fairseq", fairseq.read_folder)}
"""Suffix of a file in a folder without config.json -> name of the format, and function that reads the folder."""


def import_(config: Config, workdir: Workdir) -> None:
    """Makes a workdir that translates, scores, serves, exports and is fine-tuned as if it had been trained here.

    The checkpoint has no optimiser state, so training cannot be resumed: fine-tune it in another workdir. Compares
    log-probabilities with the other library, if it is installed, before it writes anything.

    Raises:
      UserError: if the folder has no model that this project knows, or if the workdir contains a run.
      MismatchError: if a token's log-probability differs by more than `common.TOLERANCE`.
    """
    if not config.import_.path:
        raise UserError("config: --mode=import needs --config.import.path=<folder of the model>")
    if jax.process_count() > 1:
        raise UserError("--mode=import runs in one process")
    if (workdir / "config.json").exists() or workdir.has_checkpoints:
        raise UserError(f"{workdir.path}: this workdir contains a run; choose another --workdir")
    folder = Path(config.import_.path)
    if real(folder) == real(workdir.path):
        raise UserError("--workdir is the folder of the model itself; choose another --workdir")
    kind, found = read_folder(folder)
    config = _config(config, found)
    with tempfile.TemporaryDirectory() as temporary:
        tokenizer = _write_vocabulary(Path(temporary), found)
    model = make_model(config.model, tokenizer)
    difference = None
    if config.import_.check_sentences and not (folder / "config.json").is_file():
        logs.say(f"not compared with {kind}, which cannot be called here: compare some translations yourself")
    elif config.import_.check_sentences:
        difference = _check(config, model, tokenizer, found)
    workdir.create()
    with atomic_directory(workdir / "vocabulary") as vocabulary:
        _write_vocabulary(vocabulary, found)
    write_atomically(workdir / "data.json", json.dumps({"vocabulary": tokenizer.sha256}, indent=2) + "\n")
    record = {"imported": str(folder), "format": kind, "largest_difference": difference}
    checkpoints = Checkpoints(workdir.stored("checkpoints"), config.train, logs.say)
    checkpoints.save_params(0, found.params, uniform(1.0, model.depth), record)
    write_atomically(workdir / "import.json", json.dumps(record, indent=2) + "\n")
    # Last, because it makes the folder a run.
    write_atomically(workdir / "config.json", configs.to_json(config))
    if tokenizer.has_codes:
        logs.say(f"splits text by {tokenizer.source_processor} and {tokenizer.target_processor}, then by its codes")
    parameters = sum(leaf.size for leaf in jax.tree.leaves(found.params))
    saved = f"configs/saved.py:{workdir / 'config.json'}"
    depth = f"{model.depth.encoder}L-{model.depth.decoder}L"
    logs.say(
        f"imported {folder}: {kind} {depth}, {parameters:,} parameters, {some(config.data.sources)} to "
        f"{some(config.data.targets)}; to fine-tune it: --config={saved} "
        f"--config.train.finetune_from={workdir.path} --config.data.path=<folder> --workdir=<a new one>"
    )
    print(workdir.path)


def read_folder(folder: Path) -> tuple[str, Imported]:
    """Reads a folder; returns its format and the model. Raises `UserError` if it has no known model."""
    if not (folder / "config.json").is_file():
        for suffix, (name, read) in FILES.items():
            if next(folder.glob(f"*{suffix}"), None) is not None:
                return name, read(folder)
        raise UserError(
            f"import.path={folder}: expected a folder with config.json, with Marian's .npz file, or with a .pt file of "
            "fairseq"
        )
    kind = read_json(folder / "config.json").get("model_type")
    if kind in marian.NETWORKS and (folder / "source.spm").exists():
        return kind, marian.read_folder(folder)
    if kind not in FAMILIES:
        raise UserError(f"{folder / 'config.json'}: model_type={kind} is not supported, only {', '.join(FAMILIES)}")
    return kind, FAMILIES[kind](folder)


def _config(config: Config, found: Imported) -> Config:
    """Returns the config of the new run.

    It has the options of the imported model. Options of the search, languages that the model does not name, and
    directions of a multilingual model can be given: those of `config` that differ from the defaults take precedence.
    """
    for name in ("source_normalization", "target_normalization"):
        if getattr(config.data, name) != getattr(DataConfig(), name):
            raise UserError(f"config: data.{name} does not apply, because an imported model has its own rules for text")
    source, target = found.source_lang or config.data.source_lang, found.target_lang or config.data.target_lang
    pairs = "+".join(found.tags) if found.each else ",".join(f"{source}-{tag}" for tag in found.tags)
    data = dataclasses.replace(
        config.data,
        source="text",
        source_lang=source,
        target_lang=target,
        pairs=config.data.pairs if found.tags and config.data.pairs else pairs,
        tags="each" if found.each else "source",
        max_length=min(config.data.max_length, found.model.longest or config.data.max_length),
        vocab_size=len(found.target.ids),
        shared_vocab=found.shared,
    )
    if unknown := set(data.tagged) - set(found.tags):
        raise UserError(f"config: data.pairs={data.pairs}: the model has no language {', '.join(sorted(unknown))}")
    named = {"source_lang": data.sources, "target_lang": data.targets}
    defaults = vars(DecodeConfig())
    given: dict[str, Any] = {name: "" for name, known in named.items() if getattr(found.decode, name) not in known}
    given |= {name: value for name, value in vars(config.decode).items() if value != defaults[name]}
    decode = dataclasses.replace(found.decode, **given)
    config = dataclasses.replace(config, model=found.model, data=data, decode=decode, train=TrainConfig())
    try:
        return configs.from_config_dict(dataclasses.asdict(config))
    except UserError as error:
        raise UserError(f"import.path={config.import_.path}: its options do not fit ({error})") from error


def _write_vocabulary(folder: Path, found: Imported) -> Tokenizer:
    """Writes the vocabularies and the ids of unused target pieces, and loads them."""
    for side in ("source", "target"):
        (folder / f"{side}.model").write_bytes(getattr(found, side).model)
    (folder / ABSENT).write_text("".join(f"{index}\n" for index in found.unused))
    return load_tokenizer(folder)


def _check(config: Config, model: Transformer, tokenizer: Tokenizer, found: Imported) -> float | None:
    """Compares the log-probabilities of random sentences; returns the largest difference, or None without a library."""
    sources, targets = random_sentences(model, config.import_.check_sentences, found.source.absent)
    translator = Translator(model, tokenizer, config.decode)

    def ours() -> list[np.ndarray]:
        return translator.token_log_probs(found.params, uniform(1.0, model.depth), sources, targets)

    def theirs() -> list[np.ndarray]:
        sides = (found.source, sources), (found.target, targets)
        ids = [[[side.ids[token] for token in line] for line in lines] for side, lines in sides]
        return huggingface.log_probs(Path(config.import_.path), *ids)

    return compared(ours, theirs, f"{len(sources)} random sentences", "imported")
