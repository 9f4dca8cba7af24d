"""What a training leaves to others: its vocabulary, its network, its parameters; and a run that begins with them."""

import dataclasses
import json
import shutil
from pathlib import Path

from branchnorm_jax import config as configs
from branchnorm_jax.data.prepare import Corpus, prepare
from branchnorm_jax.data.tokenizer import ORIGIN, UNUSED, Tokenizer, load_tokenizer
from branchnorm_jax.decoding.translate import make_model
from branchnorm_jax.errors import UserError
from branchnorm_jax.model.parameters import Params
from branchnorm_jax.model.transformer import BranchScale, Transformer
from branchnorm_jax.options import Config, ModelConfig
from branchnorm_jax.parallel.mesh import make_mesh
from branchnorm_jax.training import logs
from branchnorm_jax.training.checkpoint import Checkpoints
from branchnorm_jax.training.state import abstract_params
from branchnorm_jax.workdir import Workdir, atomic_directory

OF_THE_TRAINING = {
    "dropout", "attention_dropout", "activation_dropout", "word_dropout", "init", "dtype", "carry_dtype", "mask_unused",
    "alpha_schedule", "alpha_floor", "alpha_hold", "alpha_steps", "alpha_order", "alpha_stagger",
}  # fmt: skip
"""Options of the model which say how it is trained: a run may have others than that whose parameters it takes."""

OF_THE_VOCABULARY = "vocab_size", "vocab_type", "shared_vocab"
"""Options of the data that tell what vocabulary it is."""


def network(config: Config, workdir: Workdir) -> tuple[Tokenizer, Transformer]:
    """The run's vocabulary and network. Raises `UserError` if the workdir holds no run, or another vocabulary."""
    if not (workdir / "config.json").exists():
        raise UserError(f"{workdir.path}: no training run in this workdir; train first (--mode=train)")
    tokenizer = load_tokenizer(workdir / "vocabulary")
    if tokenizer.sha256 != workdir.data_identity().get("vocabulary"):
        raise UserError(f"{workdir / 'vocabulary'}: not the vocabulary that this run was trained with; restore it")
    return tokenizer, make_model(config.model, tokenizer)


def restored(config: Config, workdir: Workdir, model: Transformer, which: str) -> tuple[Params, BranchScale, int]:
    """Parameters, alpha and step of a checkpoint of the run, or of its "average". Raises `UserError` if it has none."""
    checkpoints, name = kept(config, workdir, which)
    return checkpoints.restore_params(name, abstract_params(model, make_mesh(config.parallel, 0)))


def kept(config: Config, workdir: Workdir, which: str) -> tuple[Checkpoints, str]:
    """Where the run keeps a checkpoint, and what it is called there. Raises `UserError` if there is no "average"."""
    averaged = which == "average"
    folder = workdir / ("average" if averaged else "checkpoints")
    if averaged and not folder.exists():
        raise UserError(f"{workdir.path}: no average of checkpoints; make it with --mode=average")
    return Checkpoints(folder, config.train, logs.say, read_only=True), "last" if averaged else which


def named(option: str, name: str, config: Config) -> tuple[Config, Workdir, str]:
    """The run that an option names, as "workdir" (its best checkpoint) or "workdir:checkpoint".

    Returns:
      Its config, but for the devices: they are `config`'s, whatever it was trained on; its workdir; its checkpoint.
    """
    folder, _, which = name.partition(":")
    if not folder:
        raise UserError(f"{option}={name}: this names no run; write workdir, or workdir:checkpoint")
    workdir = Workdir(Path(folder))
    if not (workdir / "config.json").exists():
        raise UserError(f"{option}: {folder}: no training run in this folder")
    theirs = dataclasses.replace(configs.load(workdir / "config.json"), parallel=config.parallel)
    return theirs, workdir, which or "best"


def parent_of(config: Config, workdir: Workdir) -> Workdir:
    """The workdir of the run that `train.finetune_from` names, for a run in `workdir`.

    Raises:
      UserError: if there is none, no such checkpoint, or its model is another one than `config`'s, or asked for
        languages in another way.
    """
    theirs, parent, which = named("train.finetune_from", config.train.finetune_from, config)
    if parent.path.resolve() == workdir.path.resolve():
        raise UserError("train.finetune_from: that is this --workdir; choose another one for the new run")
    if theirs.data.pairs and not config.data.pairs:
        raise UserError(f"train.finetune_from: {parent.path} has tags of languages; set data.pairs, be it to one pair")
    if config.data.pairs and config.data.tags != "none" and not theirs.data.pairs:
        raise UserError(
            f"train.finetune_from: {parent.path} has no tags of languages; leave data.pairs empty or set data.tags=none"
        )
    of_the_data = OF_THE_VOCABULARY + (("tags",) if theirs.data.pairs else ())
    ours = {field.name for field in dataclasses.fields(ModelConfig) if not field.metadata["free"]} - OF_THE_TRAINING
    changed = [
        f"{section}.{name}={getattr(getattr(theirs, section), name)}"
        for section, names in (("model", sorted(ours)), ("data", of_the_data))
        for name in names
        if getattr(getattr(theirs, section), name) != getattr(getattr(config, section), name)
    ]
    if changed:
        raise UserError(f"train.finetune_from: {parent.path} has another model; set {' '.join(changed)} here, too")
    # It must have the checkpoint, and the vocabulary that it was trained with: what is wrong is told before any work.
    network(theirs, parent)
    checkpoints, name = kept(theirs, parent, which)
    checkpoints.named(name)
    return parent


def take_vocabulary(parent: Workdir, workdir: Workdir) -> None:
    """Copies the parent's vocabulary, less what is noted of the parent's text."""
    with atomic_directory(workdir / "vocabulary") as temporary:
        # Which pieces are unused is a matter of the new text.
        shutil.copytree(parent / "vocabulary", temporary, ignore=shutil.ignore_patterns(UNUSED), dirs_exist_ok=True)
        # So that a run which begins here anew without a parent makes a vocabulary of its own.
        (temporary / ORIGIN).write_text(json.dumps({"run": str(parent.path)}) + "\n", encoding="utf-8")


def corpus_of(config: Config, workdir: Workdir) -> Corpus:
    """`prepare` for the run of this workdir, with the vocabulary that it has or will begin with."""
    if config.train.finetune_from and not workdir.has_checkpoints:
        take_vocabulary(parent_of(config, workdir), workdir)
    # From data.json on a training is under way, also where it has no checkpoint yet.
    keep = workdir.has_checkpoints or (workdir / "data.json").exists() or bool(config.train.finetune_from)
    return prepare(config.data, workdir.path, logs.say, keep)


def parents_parameters(config: Config, model: Transformer) -> tuple[Params, BranchScale]:
    """Parameters and alpha that the run begins with, of the run that `train.finetune_from` names."""
    theirs, parent, which = named("train.finetune_from", config.train.finetune_from, config)
    params, alpha, step = restored(theirs, parent, model, which)
    logs.say(f"begins with the parameters of {parent.path}, step {step}")
    return params, alpha
