"""Fine-tuning: a run starts with the vocabulary and the parameters of another run (`train.finetune_from`)."""

import dataclasses
import json
import shutil

import jax.numpy as jnp

from branchnorm_jax.data.prepare import Corpus, prepare
from branchnorm_jax.data.tokenizer import ORIGIN, UNUSED
from branchnorm_jax.errors import UserError
from branchnorm_jax.files import atomic_directory
from branchnorm_jax.model import growth
from branchnorm_jax.model.coefficients import Alpha
from branchnorm_jax.model.methods import get_recipe
from branchnorm_jax.model.parameters import Params
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import Config, ModelConfig
from branchnorm_jax.training import logs
from branchnorm_jax.training.trained import find_run, network, open_checkpoints, restore_model
from branchnorm_jax.workdir import Workdir

TRAINING_OPTIONS = {
    "dropout", "attention_dropout", "activation_dropout", "word_dropout", "init", "dtype", "carry_dtype", "mask_unused",
    "alpha_schedule", "alpha_floor", "alpha_hold", "alpha_steps", "alpha_order", "alpha_stagger",
    "alpha_start", "alpha_end",
}  # fmt: skip
"""Model options that only affect training. They may differ between the new run and its parent run."""

VOCABULARY_OPTIONS = "vocab_size", "vocab_type", "shared_vocab"
"""Data options that define the vocabulary."""


def parent_of(config: Config, workdir: Workdir) -> Workdir:
    """Returns the workdir of the parent run (`train.finetune_from`) of a new run in `workdir`.

    Raises:
      UserError: if the parent run or its checkpoint does not exist, if its workdir is `workdir`, or if its model,
        vocabulary options or language tags differ from `config`.
    """
    theirs, parent, which = find_run("train.finetune_from", config.train.finetune_from, config)
    if parent.stored(".").resolve() == workdir.stored(".").resolve():
        raise UserError("train.finetune_from: this is the --workdir of the new run; choose another --workdir")
    if theirs.data.pairs and not config.data.pairs:
        raise UserError(
            f"train.finetune_from: {parent.path} has language tags; set data.pairs, to a single pair if needed"
        )
    if config.data.pairs and config.data.tags != "none" and not theirs.data.pairs:
        raise UserError(
            f"train.finetune_from: {parent.path} has no language tags; leave data.pairs empty or set data.tags=none"
        )
    of_the_data = VOCABULARY_OPTIONS + (("tags",) if theirs.data.pairs else ())
    ours = {field.name for field in dataclasses.fields(ModelConfig) if not field.metadata["free"]} - TRAINING_OPTIONS
    changed = [
        f"{section}.{name}={getattr(getattr(theirs, section), name)}"
        for section, names in (("model", sorted(ours)), ("data", of_the_data))
        for name in names
        if getattr(getattr(theirs, section), name) != getattr(getattr(config, section), name)
    ]
    if changed:
        raise UserError(
            f"train.finetune_from: {parent.path} has a different model; set {' '.join(changed)} here as well"
        )
    # Check the vocabulary and the checkpoint now, so that errors appear before any work starts.
    network(theirs, parent)
    checkpoints, name = open_checkpoints(theirs, parent, which)
    checkpoints.named(name)
    return parent


def take_vocabulary(parent: Workdir, workdir: Workdir) -> None:
    """Copies the parent's vocabulary, without the list of pieces that are unused in the parent's text."""
    with atomic_directory(workdir / "vocabulary") as temporary:
        # The unused pieces depend on the text of the new run.
        shutil.copytree(parent / "vocabulary", temporary, ignore=shutil.ignore_patterns(UNUSED), dirs_exist_ok=True)
        # The origin matches no text, so a later run here without a parent trains its own vocabulary.
        (temporary / ORIGIN).write_text(json.dumps({"run": str(parent.stored("."))}) + "\n", encoding="utf-8")


def corpus_of(config: Config, workdir: Workdir) -> Corpus:
    """Prepares the corpus of the run, with its existing vocabulary, its parent's vocabulary or a new one."""
    workdir.fetch("corpus")
    if config.train.finetune_from and not workdir.has_checkpoints:
        take_vocabulary(parent_of(config, workdir), workdir)
    # data.json shows that training has started, even if there is no checkpoint yet.
    keep = workdir.has_checkpoints or (workdir / "data.json").exists() or bool(config.train.finetune_from)
    return prepare(config.data, workdir.path, logs.say, keep)


def parents_parameters(config: Config, model: Transformer) -> tuple[Params, Alpha]:
    """Restores the parameters and alpha of the run that `train.finetune_from` names.

    Raises:
      UserError: if alpha ends below the parent's alpha in this run, because the model would then compute another
        function.
    """
    theirs, parent, which = find_run("train.finetune_from", config.train.finetune_from, config)
    params, alpha, step = restore_model(theirs, parent, model, which)
    end = growth.alpha(config.model)(jnp.int32(config.model.alpha_steps))
    largest, allowed = (max(float(values.max()) for values in by_stack.values()) for by_stack in (alpha, end))
    if get_recipe(config.model.method).grows and largest > allowed + 1e-6:
        raise UserError(
            f"train.finetune_from: alpha is {largest:.3g} in {parent.path}, but ends at {allowed:.3g} here; "
            f"set model.alpha_end={theirs.model.alpha_end or '1'}"
        )
    logs.say(f"starting from the parameters of {parent.path}, step {step}")
    return params, alpha
