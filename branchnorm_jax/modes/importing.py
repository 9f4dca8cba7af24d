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
from branchnorm_jax.errors import MissingExtraError, UserError, some
from branchnorm_jax.export import huggingface
from branchnorm_jax.files import atomic_directory, real, write_atomically
from branchnorm_jax.importing import fairseq, marian, marian_npz, multilingual, t5
from branchnorm_jax.importing.imported import Imported, read_json
from branchnorm_jax.model.coefficients import uniform
from branchnorm_jax.model.methods import get_recipe
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
    folder = Path(config.import_.path)
    if real(folder) == real(workdir.path):
        raise UserError("--workdir is the folder of the model itself; choose another --workdir")
    if (workdir / "config.json").exists() or workdir.has_checkpoints:
        raise UserError(f"{workdir.path}: this workdir contains a run; choose another --workdir")
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
    if not (found.tags or (found.source_lang and found.target_lang)):
        logs.say(
            f"the folder does not name the languages, so they are taken as {config.data.pair}; if they are others, "
            "import it again with --config.data.source_lang and --config.data.target_lang"
        )
    parameters = sum(leaf.size for leaf in jax.tree.leaves(found.params))
    pairs = f"--config.data.pairs=<such as {config.data.directions()[0].pair}> " if found.tags else ""
    saved = f"configs/saved.py:{workdir / 'config.json'}"
    depth = f"{model.depth.encoder}L-{model.depth.decoder}L"
    logs.say(
        f"imported {folder}: {kind} {depth}, {parameters:,} parameters, {some(config.data.sources, 5)} to "
        f"{some(config.data.targets, 5)}; to fine-tune it: --config={saved} "
        f"--config.train.finetune_from={workdir.path} --config.data.path=<folder> {pairs}--workdir=<a new one>"
    )
    print(workdir.path)


def read_folder(folder: Path) -> tuple[str, Imported]:
    """Reads a folder; returns its format and the model. Raises `UserError` if it has no known model."""
    if not (folder / "config.json").is_file():
        for suffix, (name, read) in FILES.items():
            if next(folder.glob(f"*{suffix}"), None) is not None:
                return name, read(folder)
        if not folder.exists():
            raise UserError(
                f"import.path={folder}: no such folder; a model of the Hugging Face Hub has to be downloaded first: "
                "hf download <name> --local-dir <folder>"
            )
        raise UserError(
            f"import.path={folder}: expected a folder with config.json, with Marian's .npz file, or with a .pt file of "
            "fairseq"
        )
    values = read_json(folder / "config.json")
    if values.keys() >= {"model", "data", "train"}:
        raise UserError(f"import.path={folder}: this is a run of this project, which needs no import")
    kind = values.get("model_type")
    if kind in marian.NETWORKS and (folder / "source.spm").exists():
        return kind, marian.read_folder(folder)
    if kind == "opt":
        raise UserError(
            f"import.path={folder}: language models cannot be imported; continue with one of this project from its "
            "workdir (train.finetune_from)"
        )
    if kind not in FAMILIES:
        raise UserError(f"{folder / 'config.json'}: model_type={kind} is not supported, only {', '.join(FAMILIES)}")
    return kind, FAMILIES[kind](folder)


def _config(config: Config, found: Imported) -> Config:
    """Returns the config of the new run.

    It has the options of the imported model. Options of the search, languages that the model does not name, and
    directions of a multilingual model can be given: those of `config` that differ from the defaults take precedence.

    Raises:
      UserError: if other options are given, or languages that the model does not have.
    """
    usual = DataConfig()
    # `data.pairs` has the languages of the tags.
    each = found.tagged == "each"
    source = usual.source_lang if each else found.source_lang or config.data.source_lang
    target = usual.target_lang if found.tags else found.target_lang or config.data.target_lang
    others = [tag for tag in found.tags if tag != source]
    pairs = found.pairs or ("+".join(found.tags) if each else ",".join(f"{source}-{tag}" for tag in others))
    data = dataclasses.replace(
        config.data,
        source="text",
        source_lang=source,
        target_lang=target,
        pairs=config.data.pairs if found.tags and config.data.pairs else pairs,
        tags=found.tagged,
        max_length=min(config.data.max_length, found.model.longest or config.data.max_length),
        vocab_size=len(found.target.ids),
        shared_vocab=found.shared,
        source_normalization=usual.source_normalization,  # The models of the vocabulary have rules of their own.
        target_normalization=usual.target_normalization,
    )
    if unknown := set(data.tagged) - set(found.tags):
        raise UserError(f"config: data.pairs={data.pairs}: the model has no language {', '.join(sorted(unknown))}")
    named = {"source_lang": data.sources, "target_lang": data.targets}
    defaults = vars(DecodeConfig())
    given: dict[str, Any] = {name: "" for name, known in named.items() if getattr(found.decode, name) not in known}
    given |= {name: value for name, value in vars(config.decode).items() if value != defaults[name]}
    decode = dataclasses.replace(found.decode, **given)
    new = dataclasses.replace(config, model=found.model, data=data, decode=decode, train=TrainConfig())
    options = configs.default_config()
    options = configs.with_recommended(options, get_recipe(options.model.method).recommended)
    before, wanted, after = map(configs.to_flat, (configs.from_config_dict(options), config, new))
    if lost := [f"{name}={wanted[name]}" for name in wanted if wanted[name] not in (before[name], after[name])]:
        raise UserError(f"config: {', '.join(lost)} cannot be chosen: it is part of the model in {config.import_.path}")
    try:
        return configs.from_config_dict(dataclasses.asdict(new))
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
        try:
            return huggingface.log_probs(Path(config.import_.path), *ids)
        except MissingExtraError:
            raise
        except Exception as error:  # the library reports damaged files and missing packages by errors of many types
            summary = next(iter(str(error).strip().splitlines()), "")[:160]
            raise UserError(
                f"import.path={config.import_.path}: transformers cannot compute with it ({type(error).__name__}: "
                f"{summary}); --config.import.check_sentences=0 imports it without a comparison"
            ) from error

    return compared(ours, theirs, f"{len(sources)} random sentences", "imported")
