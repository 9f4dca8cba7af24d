"""A run starts with the vocabulary and the parameters of another run: fine-tuning and deepening.

`train.finetune_from` and `train.deepen_from` name the other run, its parent.
"""

import dataclasses
import json
import shutil

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from branchnorm_jax.data.prepare import Corpus, prepare
from branchnorm_jax.data.tags import add_tags, new_languages
from branchnorm_jax.data.tokenizer import ORIGIN, UNUSED, Tokenizer, leading_tags, load_tokenizer
from branchnorm_jax.errors import UserError, some
from branchnorm_jax.files import atomic_directory
from branchnorm_jax.model import growth
from branchnorm_jax.model.coefficients import uniform
from branchnorm_jax.model.methods import get_recipe
from branchnorm_jax.model.parameters import Params
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import Config, ModelConfig
from branchnorm_jax.tokens import UNK
from branchnorm_jax.training import deepen, logs, schedules
from branchnorm_jax.training.state import init_on
from branchnorm_jax.training.trained import find_run, network, open_checkpoints, restore_model
from branchnorm_jax.workdir import Workdir

TRAINING_OPTIONS = {
    "dropout", "attention_dropout", "activation_dropout", "word_dropout", "init", "dtype", "carry_dtype", "mask_unused",
    "alpha_schedule", "alpha_floor", "alpha_hold", "alpha_steps", "alpha_order", "alpha_stagger",
    "alpha_start", "alpha_end",
}  # fmt: skip
"""Model options that only affect training. They may differ between the new run and its parent run."""

DEEPENED_OPTIONS = {"method", "encoder_layers", "decoder_layers", "grown_from"}
"""Model options that differ between a deepened run and its parent run."""

VOCABULARY_OPTIONS = "vocab_size", "vocab_type", "shared_vocab", "source_normalization", "target_normalization"
"""Data options that define the vocabulary."""


def parent_of(config: Config, workdir: Workdir) -> Workdir:
    """Returns the workdir of the parent run of a new run in `workdir`.

    Raises:
      UserError: if the parent run or its checkpoint does not exist, if its workdir is `workdir`, if its vocabulary
        options or language tags differ from `config`, or if its model is neither the same nor one that can be deepened.
    """
    option = _option(config)
    theirs, parent, which = find_run(option, config.train.parent, config)
    if parent.stored(".").resolve() == workdir.stored(".").resolve():
        raise UserError(f"{option}: this is the --workdir of the new run; choose another --workdir")
    if theirs.data.pairs and not config.data.pairs:
        raise UserError(f"{option}: {parent.path} has language tags; set data.pairs, to a single pair if needed")
    if config.data.pairs and config.data.tags != "none" and not theirs.data.pairs:
        raise UserError(f"{option}: {parent.path} has no language tags; leave data.pairs empty or set data.tags=none")
    if theirs.model.family != config.model.family:
        their, our = (run.model.family.replace("_", "-") for run in (theirs, config))
        raise UserError(f"{option}: the model of {parent.path} is {their}, that of the new run {our}; name another run")
    of_the_data = VOCABULARY_OPTIONS + (("tags",) if theirs.data.pairs else ())
    ours = {field.name for field in dataclasses.fields(ModelConfig) if not field.metadata["free"]} - TRAINING_OPTIONS
    if config.train.deepen_from:
        _check_deepening(config, theirs.model)
        ours -= DEEPENED_OPTIONS
    changed = [
        f"{section}.{name}={getattr(getattr(theirs, section), name)}"
        for section, names in (("model", sorted(ours)), ("data", of_the_data))
        for name in names
        if getattr(getattr(theirs, section), name) != getattr(getattr(config, section), name)
    ]
    if changed:
        raise UserError(f"{option}: {parent.path} has a different model; set {' '.join(changed)} here as well")
    # Check the vocabulary and the checkpoint now, so that errors appear before any work starts.
    tokenizer, _ = network(theirs, parent)
    try:
        new_languages(tokenizer.languages, config.data.tagged)
    except UserError as error:
        raise UserError(f"{option}: {parent.path}: {error}") from error
    checkpoints, name = open_checkpoints(theirs, parent, which)
    checkpoints.named(name)
    return parent


def _option(config: Config) -> str:
    """Returns the name of the option that names the parent. Raises `UserError` if both do."""
    if config.train.finetune_from and config.train.deepen_from:
        raise UserError("config: set either train.finetune_from or train.deepen_from")
    return "train.deepen_from" if config.train.deepen_from else "train.finetune_from"


def _check_deepening(config: Config, theirs: ModelConfig) -> None:
    """Raises `UserError` unless the model of `config` can be made of one with the options `theirs`."""
    ours = config.model
    if ours.depth == theirs.depth:
        raise UserError(
            f"train.deepen_from: the parent has this depth already ({theirs.depth}); give more layers, or use "
            "train.finetune_from"
        )
    if ours.grown_from != theirs.depth:
        raise UserError(
            f"train.deepen_from: the parent has the depth {theirs.depth}; set model.grown_from={theirs.depth}"
        )
    if frozen := [s for s in ours.stacks if s in config.train.frozen and not growth.old_layers(ours, s).all()]:
        raise UserError(
            f"train.deepen_from: train.freeze={frozen[0]} would also freeze the new layers; to train only these, set "
            "train.parent_rate=0"
        )
    for stack, alpha in growth.alpha(ours)(jnp.int32(0)).items():
        if (first := float(np.max(np.where(growth.old_layers(ours, stack), 0, alpha)))) > 0:
            raise UserError(
                f"train.deepen_from: alpha of the new layers must begin at 0, and begins at {first:.3g}, with which "
                "they would change what the parent computes; leave model.alpha_start and model.alpha_order at their "
                "defaults"
            )
    if theirs.method not in deepen.METHODS.get(ours.method, ()):
        fitting = [method for method, parents in deepen.METHODS.items() if theirs.method in parents]
        hint = f"set model.method={fitting[0]}" if fitting else "only Post-LN, Pre-LN and BranchNorm can be deepened"
        raise UserError(f"train.deepen_from: {ours.method} cannot grow from {theirs.method}; {hint}")
    if "post_ln" in deepen.METHODS[ours.method] and ours.norm in deepen.SATURATING:
        raise UserError(
            f"train.deepen_from: {ours.method} cannot grow with model.norm={ours.norm}, because each new layer would "
            "change what the old ones compute; only Pre-LN can"
        )


def take_vocabulary(config: Config, parent: Workdir, workdir: Workdir) -> None:
    """Copies the parent's vocabulary, without the list of pieces that are unused in the parent's text.

    Languages of the new run that have no tag in it get one.
    """
    with atomic_directory(workdir / "vocabulary") as temporary:
        # The unused pieces depend on the text of the new run.
        shutil.copytree(parent / "vocabulary", temporary, ignore=shutil.ignore_patterns(UNUSED), dirs_exist_ok=True)
        known = load_tokenizer(temporary).languages
        if new := new_languages(known, config.data.tagged):
            add_tags(temporary, new)
            logs.say(
                f"new languages: {some(new)}; their tags begin as the mean of the tags of {parent.path}: {some(known)}"
            )
        # The origin matches no text, so a later run here without a parent trains its own vocabulary.
        (temporary / ORIGIN).write_text(json.dumps({"run": str(parent.stored("."))}) + "\n", encoding="utf-8")


def corpus_of(config: Config, workdir: Workdir) -> Corpus:
    """Prepares the corpus of the run, with its existing vocabulary, its parent's vocabulary or a new one.

    Raises:
      UserError: if the run has begun with other text; its tokens are kept.
    """
    workdir.fetch("corpus")
    if config.train.parent and not workdir.has_checkpoints:
        take_vocabulary(config, parent_of(config, workdir), workdir)
    # data.json shows that training has started, even if there is no checkpoint yet.
    keep = workdir.has_checkpoints or (workdir / "data.json").exists() or bool(config.train.parent)
    # An imported model has no text.
    begun = workdir.has_checkpoints and (workdir / "data.json").exists() and "train" in workdir.data_identity()
    return prepare(config.data, workdir.path, logs.say, keep, check=workdir.check_data if begun else None)


def first_parameters(config: Config, model: Transformer, mesh: Mesh) -> tuple[Params, int]:
    """Returns the first parameters of a run with a parent, split over the mesh of the run, and the clock of alpha.

    Raises:
      UserError: if the alpha of a layer ends below the parent's in this run, or alpha begins above it, because the
        model would then compute another function.
    """
    option = _option(config)
    theirs, parent, which = find_run(option, config.train.parent, config)
    tokenizer, old = network(theirs, parent)
    params, alpha, step = restore_model(theirs, parent, old, which, mesh)
    params = with_new_tags(params, tokenizer, model)
    if config.train.deepen_from:
        if not old.recipe.grows:
            alpha = uniform(1.0, old.depth)
        logs.say(f"{config.model.grown_from} grows from the parameters of {parent.path}, step {step}")
        fresh = init_on(mesh, model, config.train.seed)
        return deepen.deepened(params, alpha, fresh, config.model), 0
    grows = get_recipe(config.model.method).grows
    if grows:
        begin, end = (growth.alpha(config.model)(jnp.int32(clock)) for clock in (0, config.model.alpha_steps))
        for stack, values in alpha.items():
            layer = int(jnp.argmax(values - end[stack]))
            largest, allowed = float(values[layer]), float(end[stack][layer])
            if largest > allowed + 1e-6:
                raise UserError(
                    f"{option}: alpha of {stack} layer {layer + 1} is {largest:.3g} in {parent.path}, but ends at "
                    f"{allowed:.3g} here; set model.alpha_end={theirs.model.alpha_end or '1'}"
                )
        mean, first = schedules.mean(alpha), schedules.mean(begin)
        if first > mean + 1e-6:
            names = "alpha_start", "alpha_order"
            raise UserError(
                f"{option}: the mean of alpha is {mean:.3g} in {parent.path}, but begins at {first:.3g} here; set "
                + " ".join(f"model.{name}={getattr(theirs.model, name)}" for name in names)
            )
    logs.say(f"starting from the parameters of {parent.path}, step {step}")
    clock = schedules.clock_at(config.model, alpha)
    own = growth.alpha(config.model)(jnp.int32(clock))
    if grows and any(bool((abs(own[s] - alpha[s]) > 0.01).any()) for s in alpha):
        logs.say(
            f"{option}: alpha begins with the mean of {parent.path}, {schedules.mean(alpha):.3g}, but not its values "
            f"in some layers, so the model computes another function; model.alpha_end={theirs.model.alpha_end or '1'} "
            f"model.alpha_order={theirs.model.alpha_order} keeps it"
        )
    return params, clock


def with_new_tags(params: Params, tokenizer: Tokenizer, model: Transformer) -> Params:
    """Adds the rows of new language tags to the embedding tables, the output table and its bias.

    Each is the mean of the rows of the existing tags. So the input of a model that is given a new tag is a typical one,
    and in the softmax a new tag is about as improbable as the others: log-probabilities of old languages become lower
    by log(1 + p), where p is the probability of the new tags relative to all other pieces.

    Args:
      params: parameters of the parent.
      tokenizer: its vocabulary.
      model: the new model, with `data.tags.add_tags` of the vocabulary.
    """
    sides = {
        "source": (leading_tags(tokenizer.source_pieces), model.source_vocab - tokenizer.source_size),
        "target": (leading_tags(tokenizer.target_pieces), model.target_vocab - tokenizer.target_size),
    }
    side_of = {"shared": "source", "source": "source", "target": "target", "output": "target", "bias": "target"}
    tables = dict(params["embedding"])
    for name in tables.keys() & side_of.keys():
        tags, new = sides[side_of[name]]
        if new:
            first, end = UNK + 1, UNK + 1 + len(tags)
            table = tables[name]
            mean = table[first:end].mean(0, keepdims=True)
            tables[name] = jnp.concatenate([table[:end], jnp.repeat(mean, new, axis=0), table[end:]])
    return params | {"embedding": tables}
