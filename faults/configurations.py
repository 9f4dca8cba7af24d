"""Random options: a config is refused in one line, or its update can be traced and counted, or trained."""

import os
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from branchnorm_jax import config as configs
from branchnorm_jax.analysis import estimate
from branchnorm_jax.errors import BranchNormError
from branchnorm_jax.model.initializers import BASES
from branchnorm_jax.model.methods import METHODS
from branchnorm_jax.options import Config, fields
from branchnorm_jax.training.optimizer import OPTIMIZERS
from branchnorm_jax.training.schedules import LEARNING_RATES
from faults.processes import ROOT, TINY, run
from faults.trial import Family, Outcome, Trial

SMALL: dict[str, Any] = {
    "model.encoder_layers": 3,
    "model.decoder_layers": 2,
    "model.width": 16,
    "model.ffn_width": 24,
    "model.heads": 2,
    "model.remat": "none",
    "data.vocab_size": 300,
    "train.batch_tokens": 256,
    "train.steps": 2,
    "train.warmup_steps": 1,
}
"""Options of every config, unless they are drawn."""

DECODER: dict[str, Any] = {
    "model.family": "decoder",
    "model.encoder_layers": 0,
    "data.source": "documents",
    "data.vocab_type": "bytes",
    "data.vocab_size": 259,
    "data.context": 32,
    "train.best_metric": "loss",
    "train.eval_bleu_sentences": 0,
    "decode.beam_size": 1,
}
"""Further options of language models."""

QUICK: dict[str, Any] = {
    "data.numerals_pairs": 300,
    "data.max_length": 128,
    "data.batch_shapes": 1,
    "train.batch_tokens": 1024,
    "train.eval_bleu_sentences": 4,
    "decode.beam_size": 1,
    "decode.max_length_b": 4,
}
"""Further options of the configs that are trained: little text and few programs, so that a trial takes seconds."""

NAMES: dict[str, tuple[str, ...]] = {
    "model.method": tuple(METHODS),
    "model.init": ("", *BASES),
    "model.alpha_start": ("", "0.1", "1/sqrt(n)", "deepnorm", "l/L", "1/0", "2**9**9**9"),
    "model.alpha_end": ("", "1", "0.5", "4/sqrt(n)", "L - L", "-1", "import os"),
    "model.grown_from": ("", "1L-1L", "2L", "1L", "three"),
    "train.optimizer": tuple(OPTIMIZERS),
    "train.schedule": tuple(LEARNING_RATES),
    "train.freeze": ("", "encoder", "decoder", "embedding", "encoder,embedding", "heads"),
}
"""Values of options that are names or formulas. Options with other text, such as paths, keep their defaults."""

LARGEST: dict[str, int] = {
    **dict.fromkeys(("model.encoder_layers", "model.decoder_layers", "model.base_layers"), 12),
    **dict.fromkeys(("model.width", "model.ffn_width", "model.heads", "model.head_width"), 64),
    **dict.fromkeys(("data.vocab_size", "data.context", "data.max_length", "data.numerals_pairs"), 600),
    **dict.fromkeys(("train.batch_tokens", "train.steps"), 2048),
}
"""Sizes that are not drawn larger, because a trial has to take seconds."""

SECTIONS = ("model", "data", "train", "decode", "evaluate")

DRAWN = [
    (name, field)
    for name, field in fields()
    if name.split(".")[0] in SECTIONS
    and name != "train.epochs"  # excludes train.steps
    and (not isinstance(field.default, str) or field.metadata["choices"] or name in NAMES)
]
"""The options that are drawn."""


def value(name: str, field: Any, rng: random.Random) -> Any:
    """Draws a value of an option: the ends of its range, small numbers and its default are likely."""
    meta, default = field.metadata, field.default
    if isinstance(default, bool):
        return rng.random() < 0.5
    if isinstance(default, str):
        return rng.choice(meta["choices"] or NAMES[name])
    low = 0 if meta["minimum"] is None else meta["minimum"]
    high = min(LARGEST.get(name, 10**6), 10**9 if meta["maximum"] is None else meta["maximum"])
    if isinstance(default, int):
        drawn = rng.choice((low, low + 1, 2, 3, 4, 5, 7, 8, 16, 32, 64, default, high))
    else:
        drawn = float(rng.choice((low, 1e-9, 0.01, 0.1, 0.5, 0.9, 0.99, 1, 2, 30, default, high)))
    return drawn if rng.random() < 0.02 else type(default)(min(high, max(low, drawn)))


def draw(rng: random.Random, common: Mapping[str, Any] = SMALL) -> dict[str, Any]:
    """Draws the options of a config that differ from the defaults; `common` are those that all configs share."""
    changes = {name: value(name, field, rng) for name, field in rng.sample(DRAWN, rng.randint(1, 15))}
    return {**common, **(DECODER if rng.random() < 0.3 else {}), **changes}


def built(options: dict[str, Any]) -> Config:
    """Returns the config of options, and traces its update. Raises `BranchNormError` if it is refused."""
    values = configs.default_config()
    with values.unlocked():
        for name, each in options.items():
            section, _, option = name.partition(".")
            values[section][option] = each
    config = configs.from_config_dict(values)
    length = estimate.lengths(config)[0]
    estimate.update_costs(config, estimate.rows_of(config, length, 1), length)
    return config


def described(options: dict[str, Any]) -> str:
    """Returns the options that differ from `SMALL`."""
    return " ".join(f"{name}={each}" for name, each in options.items() if SMALL.get(name) != each)


def refusal(message: str) -> str:
    """Returns what is wrong with the message of a refusal; "" if it is one short line."""
    return "" if 0 < len(message) < 400 and "\n" not in message else f"a refusal should be one line: {message[:200]!r}"


def trace(rng: random.Random, folder: Path) -> Outcome:
    """Builds, traces and counts a random config."""
    del folder
    options = draw(rng)
    try:
        built(options)
    except BranchNormError as error:
        return Outcome("refused", described(options), str(error), error.exit_code, wrong=refusal(str(error)))
    except Exception as error:
        return Outcome("failed", described(options), wrong=f"{type(error).__name__}: {error}"[:300])
    finally:
        if rng.random() < 0.02:
            jax.clear_caches()
            estimate.update_costs.cache_clear()
    return Outcome("built", described(options))


def unoptimized() -> None:
    """Makes this process compile in half the time; a trial trains two updates, and compiles for most of its time."""
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"


def train(cache: Path, rng: random.Random, folder: Path) -> Outcome:
    """Trains two updates with the first random config that is not refused, or until something is wrong."""
    while True:
        options = draw(rng, {**SMALL, **QUICK})
        try:
            built(options)
        except BranchNormError:
            continue
        flags = [f"--config.{name}={each}" for name, each in options.items()]
        text = [f"--config.data.path={ROOT}", "--config.data.files=README.md"] if "data.source" in options else []
        workdir = folder / "run"
        done = run([TINY[0], *text, *flags, f"--workdir={workdir}"], cache, prepared=unoptimized)
        if done.code not in (2, 3):
            wrong = done.fault or (f"exit code {done.code}: {done.said}" if done.code else "")
            return Outcome("trained", described(options), done.said if done.code else "", done.code, wrong=wrong)
        if wrong := done.fault or refusal(done.said):
            return Outcome("refused", described(options), done.said, done.code, wrong=wrong)
        shutil.rmtree(workdir, ignore_errors=True)


def prepare_training(shared: Path, seconds: float) -> Trial:
    """Returns `train` with a cache of compiled programs."""
    return lambda rng, folder: train(shared / "compiled", rng, folder)


TRACED = Family(
    "Random options",
    "One to fifteen options are drawn at random. The config must be refused in one line, or its update must be built, "
    "traced and counted by the plan.",
    lambda shared, seconds: trace,
    10_000,
)

TRAINED = Family(
    "Random options, trained",
    "Options are drawn until updates can be trained with them: two, or as many as drawn. A config that cannot be "
    "trained must be refused in one line.",
    prepare_training,
    300,
)
