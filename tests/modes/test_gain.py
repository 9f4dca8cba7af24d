"""The source gain of pairs, as --mode=clean uses it."""

import dataclasses
import itertools
import json
import statistics
from pathlib import Path

import jax
import numpy as np
import pytest

from branchnorm_jax import config as configs
from branchnorm_jax.data.corpus import read_pairs
from branchnorm_jax.errors import UserError
from branchnorm_jax.modes.clean import clean
from branchnorm_jax.modes.gain import SourceGain
from branchnorm_jax.options import Config
from branchnorm_jax.workdir import Workdir


def config_of(trained: Path, **options: object) -> Config:
    values = configs.default_config("1L-1L")
    with values.unlocked():
        values.data.numerals_pairs = 100
        values.clean.update(drop="empty", score_with=str(trained), **options)
    return configs.from_config_dict(values)


def test_gain_is_the_log_probability_minus_that_given_other_sources(trained: Path) -> None:
    config = config_of(trained, min_gain=0.05)
    gain = SourceGain(config, config.data)
    pairs = list(itertools.islice(read_pairs(config.data, "train"), 5))
    model = gain.trained.translator, gain.trained.params, gain.trained.alpha

    def log_prob(source: str, target: str) -> tuple[float, int]:
        ((log_prob, tokens),) = model[0].score(*model[1:], [(source, target)])
        return log_prob, tokens

    expected = []
    for index, (source, target) in enumerate(pairs):
        own, tokens = log_prob(source, target)
        others = [log_prob(pairs[(index + shift) % 5][0], target)[0] for shift in (1, 3)]
        expected.append((own - statistics.mean(others)) / tokens)
    np.testing.assert_allclose(gain.gains(pairs), expected, atol=1e-5)
    assert gain.decisions(pairs) == [value >= 0.05 for value in gain.gains(pairs).tolist()]
    assert gain.decisions(pairs[:2]) == [True, True]


def test_pairs_that_are_too_long_for_the_model_are_kept(trained: Path) -> None:
    config = config_of(trained, min_gain=0.05)
    gain = SourceGain(config, config.data)
    pairs = list(itertools.islice(read_pairs(config.data, "train"), 6))
    long = "seven " * 40, "sieben"
    translator = gain.trained.translator
    few = dataclasses.replace(translator.model.config, positions="learned", max_positions=64)
    model = dataclasses.replace(translator.model, config=few)
    params = jax.jit(model.init)(jax.random.key(0))
    gain.trained = gain.trained._replace(translator=dataclasses.replace(translator, model=model), params=params)
    alone = gain.decisions(pairs)
    assert gain.decisions([*pairs[:3], long, *pairs[3:]]) == [*alone[:3], True, *alone[3:]]


def test_pairs_with_a_small_gain_are_removed(trained: Path, tmp_path: Path) -> None:
    config = config_of(trained)
    gains = SourceGain(config, config.data).gains(list(read_pairs(config.data, "train")))
    middle = float(np.sort(gains)[49:51].mean())
    clean(config_of(trained, min_gain=middle), Workdir(tmp_path))
    numbers = json.loads((tmp_path / "clean" / "clean.json").read_text())
    assert (numbers["kept"], numbers["removed"]) == (50, {"source_gain": 50})
    kept = [pair for pair, gain in zip(read_pairs(config.data, "train"), gains, strict=True) if gain > middle]
    assert (tmp_path / "clean" / "train.de").read_text().splitlines() == [target for _, target in kept]


def test_other_languages_are_refused(trained: Path) -> None:
    values = configs.default_config("1L-1L")
    values.data.target_lang = "fr"
    values.clean.score_with = str(trained)
    config = configs.from_config_dict(values)
    with pytest.raises(UserError, match="translates en-de, not en-fr"):
        SourceGain(config, config.data)
