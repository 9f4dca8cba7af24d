"""--mode=import: makes a workdir of a model that another toolkit trained."""

import dataclasses
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from branchnorm_jax import config as configs
from branchnorm_jax.data.tokenizer import Tokenizer, load_tokenizer
from branchnorm_jax.decoding.translate import Translator
from branchnorm_jax.errors import MismatchError, UserError
from branchnorm_jax.export import huggingface
from branchnorm_jax.files import atomic_directory, write_atomically
from branchnorm_jax.importing import marian, marian_npz
from branchnorm_jax.importing.imported import Imported, read_json
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import Config, TrainConfig
from branchnorm_jax.tokens import EOS, UNK
from branchnorm_jax.training import logs
from branchnorm_jax.training.checkpoint import Checkpoints
from branchnorm_jax.training.network import make_model
from branchnorm_jax.workdir import Workdir

FAMILIES = {"marian": marian.read_folder}
"""model_type in config.json -> function that reads the folder."""

NPZ = "marian's npz"
"""What messages call the format of `marian_npz`, which has no config.json."""

TOLERANCE = 1e-3
"""Largest accepted difference between the log-probabilities of a token in the other library and in ours."""

LONGEST = 30
"""Tokens of the longest random sentence."""


def import_(config: Config, workdir: Workdir) -> None:
    """Makes a workdir that translates, scores, serves, exports and is fine-tuned as if it had been trained here.

    The checkpoint has no optimiser state, so training cannot be resumed: fine-tune it in another workdir. Compares
    log-probabilities with the other library, if it is installed.

    Raises:
      UserError: if the folder has no model that this project knows, or if the workdir contains a run.
      MismatchError: if a token's log-probability differs by more than `TOLERANCE`. The workdir is then incomplete.
    """
    folder = Path(config.import_.path)
    if not config.import_.path:
        raise UserError("config: --mode=import needs --config.import.path=<folder of the model>")
    if (workdir / "config.json").exists():
        raise UserError(f"{workdir.path}: this workdir contains a run; choose another --workdir")
    kind, found = _read(folder)
    config = _config(config, found)
    workdir.create()
    tokenizer = _write_vocabulary(workdir, found)
    model = make_model(config.model, tokenizer)
    _check_shapes(model, found)
    difference = None
    if config.import_.check_sentences and kind == NPZ:
        logs.say("not compared with Marian, which cannot be called from Python: compare some translations yourself")
    elif config.import_.check_sentences:
        difference = _check(config, model, tokenizer, found)
    write_atomically(workdir / "data.json", json.dumps({"vocabulary": tokenizer.sha256}, indent=2) + "\n")
    alpha = {stack: jnp.ones(getattr(model.depth, stack)) for stack in model.depth._fields}
    record = {"imported": str(folder), "model_type": kind, "largest_difference": difference}
    Checkpoints(workdir.stored("checkpoints"), config.train, logs.say).save_params(0, found.params, alpha, record)
    write_atomically(workdir / "import.json", json.dumps(record, indent=2) + "\n")
    # Last, because it makes the folder a run.
    write_atomically(workdir / "config.json", configs.to_json(config))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(found.params))
    saved = f"configs/saved.py:{workdir / 'config.json'}"
    depth = f"{model.depth.encoder}L-{model.depth.decoder}L"
    targets = [direction.target_lang for direction in config.data.directions()]
    languages = f"{config.data.source_lang} to {', '.join(targets)}"
    logs.say(f"imported {folder}: {kind} {depth}, {parameters:,} parameters, {languages}")
    logs.say(
        f"to fine-tune it: --config={saved} --config.train.finetune_from={workdir.path} --config.data.path=<folder> "
        "--workdir=<a new one>"
    )
    print(workdir.path)


def _read(folder: Path) -> tuple[str, Imported]:
    """Reads a folder; returns its format and the model."""
    if not (folder / "config.json").is_file():
        if next(folder.glob("*.npz"), None) is None:
            raise UserError(f"import.path={folder}: expected a folder with config.json, or with Marian's .npz file")
        return NPZ, marian_npz.read_folder(folder)
    kind = read_json(folder / "config.json").get("model_type")
    if kind not in FAMILIES:
        raise UserError(f"{folder / 'config.json'}: model_type={kind} is not supported, only {', '.join(FAMILIES)}")
    return kind, FAMILIES[kind](folder)


def _config(config: Config, found: Imported) -> Config:
    """Returns the config of the new run: the model's options, and the defaults of this project.

    Languages that the model does not name are those of the given config.
    """
    source, targets = found.source_lang or config.data.source_lang, found.target_langs or (config.data.target_lang,)
    data = dataclasses.replace(
        config.data,
        source="text",
        source_lang=source,
        target_lang=targets[0],
        pairs=",".join(f"{source}-{target}" for target in targets) if len(targets) > 1 else "",
        vocab_size=len(found.target.ids),
        shared_vocab=found.source.ids == found.target.ids,
    )
    train = TrainConfig(learning_rate=config.train.learning_rate)
    config = dataclasses.replace(config, model=found.model, data=data, decode=found.decode, train=train)
    return configs.from_config_dict(dataclasses.asdict(config))


def _write_vocabulary(workdir: Workdir, found: Imported) -> Tokenizer:
    """Writes the SentencePiece models."""
    with atomic_directory(workdir / "vocabulary") as temporary:
        for side in ("source", "target"):
            (temporary / f"{side}.model").write_bytes(getattr(found, side).spm)
    return load_tokenizer(workdir / "vocabulary")


def _check_shapes(model: Transformer, found: Imported) -> None:
    """Raises `UserError` unless the parameters have the shapes of the model's."""
    expected, given = (jax.tree_util.tree_leaves_with_path(tree) for tree in (model.abstract_params(), found.params))
    for (path, wanted), (other, leaf) in itertools.zip_longest(expected, given, fillvalue=((), np.zeros(0))):
        if path != other or wanted.shape != leaf.shape:
            names = jax.tree_util.keystr(path), jax.tree_util.keystr(other)
            raise UserError(f"import: {names[0]} {wanted.shape} was expected, not {names[1]} {leaf.shape}")


def _check(config: Config, model: Transformer, tokenizer: Tokenizer, found: Imported) -> float | None:
    """Compares the log-probabilities of random sentences; returns the largest difference, or None without a library."""
    rng = np.random.default_rng(0)

    def sentences(theirs: list[int]) -> list[list[int]]:
        common = [index for index, other in enumerate(theirs) if other >= 0 and index > UNK + model.tags]
        return [[*rng.choice(common, rng.integers(1, LONGEST)).tolist(), EOS] for _ in range(count)]

    count = config.import_.check_sentences
    sides = [sentences(side.ids) for side in (found.source, found.target)]
    translator = Translator(model, tokenizer, config.decode)
    alpha = {stack: jnp.ones(getattr(model.depth, stack)) for stack in model.depth._fields}
    ours = translator.token_log_probs(found.params, alpha, *sides)
    theirs = [
        [[side.ids[token] for token in sentence] for sentence in lines]
        for side, lines in zip((found.source, found.target), sides, strict=True)
    ]
    try:
        expected = huggingface.log_probs(Path(config.import_.path), *theirs)
    except UserError as error:
        logs.say(f"the imported model was not checked: {error}")
        return None
    largest = float(np.abs(np.concatenate(ours) - np.concatenate(expected)).max())
    logs.say(f"largest difference of a token's log-probability over {count} random sentences: {largest:.2e}")
    if not largest <= TOLERANCE:
        raise MismatchError(f"import: log-probabilities differ by {largest:.2e}, more than {TOLERANCE}")
    return largest
