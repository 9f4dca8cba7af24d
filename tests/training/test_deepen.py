"""Models that grow from shallower ones: the same function at first, then their own."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branchnorm_jax import config as configs
from branchnorm_jax.errors import UserError
from branchnorm_jax.model import growth
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import Config, ModelConfig, TrainConfig
from branchnorm_jax.tokens import EOS
from branchnorm_jax.training import loop, schedules
from branchnorm_jax.training.deepen import deepened
from branchnorm_jax.training.trained import network, restore_model
from branchnorm_jax.workdir import Workdir

SMALL = ModelConfig(width=32, heads=4, ffn_width=48, encoder_layers=2, decoder_layers=3, output_bias=True)
RNG = np.random.default_rng(0)
SOURCE, INPUTS = (jnp.array([[*RNG.integers(3, 40, 9), EOS], [*RNG.integers(3, 40, 5), EOS, 0, 0, 0, 0]]) for _ in "st")


def model_of(config: ModelConfig) -> Transformer:
    return Transformer(config, 40, 40)


def random_params(model: Transformer, size: float = 0.3) -> Any:
    """Returns parameters without a neutral norm or a zero bias."""
    leaves, tree = jax.tree.flatten(jax.jit(model.init)(jax.random.key(0)))
    keys = jax.random.split(jax.random.key(7), len(leaves))
    moved = [leaf + size * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, moved)


@pytest.mark.parametrize(
    ("parent", "alpha", "method", "norm"),
    [
        ("post_ln", 1.0, "branchnorm", ""),
        pytest.param("post_ln", 1.0, "branchnorm", "scale_norm", marks=pytest.mark.slow),
        pytest.param("pre_ln", 1.0, "prores_pre_ln", "derf", marks=pytest.mark.slow),
        pytest.param("prores_pre_ln", 0.7, "prores_pre_ln", "", marks=pytest.mark.slow),
        pytest.param("branchnorm", 0.4, "branchnorm", "", marks=pytest.mark.slow),
        pytest.param("pre_ln", 1.0, "prores_pre_ln", "", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("depth", [(3, 4), pytest.param((5, 9), marks=pytest.mark.slow)])
def test_the_function_is_the_same_at_first(
    parent: str, alpha: float, method: str, norm: str, depth: tuple[int, int]
) -> None:
    small = dataclasses.replace(SMALL, norm=norm or SMALL.norm)
    old = model_of(dataclasses.replace(small, method=parent))
    params = random_params(old)
    # Only methods with a growing branch have another alpha than 1.
    alphas = {"encoder": jnp.full(2, alpha), "decoder": jnp.array([alpha, alpha * alpha, alpha])}
    expected = old(params, SOURCE, INPUTS, alphas)
    new = model_of(
        dataclasses.replace(small, method=method, encoder_layers=depth[0], decoder_layers=depth[1], grown_from="2L-3L")
    )
    grown = deepened(params, alphas, new.init(jax.random.key(1)), new.config)
    start = growth.alpha(new.config)
    actual = new(grown, SOURCE, INPUTS, start(jnp.int32(0)))
    assert jnp.abs(actual - expected).max() < 1e-4 * jnp.abs(expected).max()
    np.testing.assert_allclose(jax.nn.log_softmax(actual), jax.nn.log_softmax(expected), atol=1e-4)
    # Later, the new layers change it.
    later = new(grown, SOURCE, INPUTS, start(jnp.int32(new.config.alpha_steps)))
    assert jnp.abs(later - expected).max() > 0.01 * jnp.abs(expected).max()


def test_alpha_of_old_layers_is_1_and_that_of_new_layers_grows() -> None:
    config = ModelConfig(encoder_layers=6, decoder_layers=5, grown_from="2L-2L", alpha_steps=10, alpha_end="0.8")
    alpha = growth.alpha(config)(jnp.int32(5))
    np.testing.assert_allclose(alpha["encoder"], [1, 0.4, 0.4, 1, 0.4, 0.4], rtol=1e-6)
    np.testing.assert_allclose(alpha["decoder"], [1, 0.4, 1, 0.4, 0.4], rtol=1e-6)


@pytest.mark.parametrize("grown_from", ["7L-2L", "0L-1L", "six"])
def test_impossible_depths(grown_from: str) -> None:
    with pytest.raises(UserError, match="grown_from"):
        growth.alpha(ModelConfig(encoder_layers=6, decoder_layers=5, grown_from=grown_from))


def test_rates_of_old_new_and_frozen_parts() -> None:
    model = ModelConfig(method="branchnorm", encoder_layers=4, decoder_layers=2, grown_from="2L-2L", alpha_steps=10)
    train = TrainConfig(parent_rate=0.1, branch_update_power=2, freeze="decoder")
    config = Config(model=model, train=train)
    rates = schedules.rates(config)(jnp.int32(0), growth.alpha(model)(jnp.int32(5)), jnp.float32(2.0))
    np.testing.assert_allclose(rates["encoder"], [0.2, 2 * 0.25, 0.2, 2 * 0.25], rtol=1e-6)
    assert rates["embedding"] == pytest.approx(0.2)
    assert rates["decoder"] == rates["decoder_norm"] == 0
    plain = schedules.rates(Config(model=dataclasses.replace(model, grown_from="", method="post_ln")))
    assert set(plain(jnp.int32(0), {}, jnp.float32(2.0))) == {"encoder", "decoder"}


def child_of(parent: Path, model: dict[str, Any], **train: Any) -> Config:
    config = configs.load(parent / "config.json")
    return dataclasses.replace(
        config,
        model=dataclasses.replace(
            config.model, **{"encoder_layers": 4, "decoder_layers": 3, "alpha_steps": 20} | model
        ),
        train=dataclasses.replace(config.train, deepen_from=str(parent), **train),
    )


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_a_trained_run_grows_and_learns(trained: Path, tmp_path: Path) -> None:
    """With rate 0 the loss is the parent's; with a rate it falls; frozen parts stay as they are."""
    still, moving = Workdir(tmp_path / "still"), Workdir(tmp_path / "moving")
    grown = {"grown_from": "2L-2L"}
    loop.train(child_of(trained, grown, steps=1, eval_every=1, learning_rate=0.0, warmup_init=0.0), still)
    last = read(trained / "validation.jsonl")[-1]
    first = read(still / "validation.jsonl")[0]
    assert first["nll"] == pytest.approx(last["nll"], abs=0.01)
    config = child_of(trained, grown, steps=60, eval_every=60, learning_rate=5e-3, freeze="embedding")
    loop.train(config, moving)
    assert read(moving / "validation.jsonl")[-1]["nll"] < first["nll"]
    params = {}
    for name, workdir in (("parent", Workdir(trained)), ("child", moving)):
        saved = configs.load(workdir / "config.json")
        params[name] = restore_model(saved, workdir, network(saved, workdir)[1], "last")[0]
    jax.tree.map(np.testing.assert_array_equal, params["child"]["embedding"], params["parent"]["embedding"])
    assert (
        params["child"]["encoder"]["ffn"]["fc1"]["kernel"][0] != params["parent"]["encoder"]["ffn"]["fc1"]["kernel"][0]
    ).any()


@pytest.mark.parametrize(
    ("model", "train", "message"),
    [
        ({}, {}, "set model.grown_from=2L-2L"),
        ({"grown_from": "1L-2L"}, {}, "set model.grown_from=2L-2L"),
        ({"grown_from": "2L-2L", "encoder_layers": 2, "decoder_layers": 2}, {}, "has this depth already"),
        ({"grown_from": "1L-2L", "encoder_layers": 2, "decoder_layers": 2}, {}, "has this depth already"),
        ({"grown_from": "2L-2L", "method": "deepnorm"}, {}, "set model.method=branchnorm"),
        ({"grown_from": "2L-2L", "norm": "derf"}, {}, "branchnorm cannot grow with model.norm=derf"),
        ({"grown_from": "2L-2L", "width": 8}, {}, "model.width=16"),
        ({"grown_from": "2L-2L"}, {"finetune_from": "runs/x"}, "either train.finetune_from or train.deepen_from"),
        ({"grown_from": "2L-2L", "alpha_start": "0.6"}, {}, "new layers must begin at 0, and begins at 0.6"),
        ({"grown_from": "2L-2L", "alpha_order": "fix_sqrt_L"}, {}, "new layers must begin at 0, and begins at 0.5"),
        ({"grown_from": "2L-2L"}, {"freeze": "middle"}, "train.freeze: middle"),
        ({"grown_from": "2L-2L"}, {"freeze": "encoder"}, "train.freeze=encoder would also freeze the new layers"),
    ],
)
def test_what_does_not_fit_is_refused(
    trained: Path, tmp_path: Path, model: dict[str, Any], train: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        loop.train(child_of(trained, model, **train), Workdir(tmp_path / "child"))
