"""Compares the layer statistics with their definitions, and tests the file and the figure that a run writes."""

import dataclasses
import functools
import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from branchnorm_jax.analysis.report import draw_layers
from branchnorm_jax.model.blocks import similarity
from branchnorm_jax.model.segments import causal_mask, same_sentence, source_segments, target_segments
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import Config, ModelConfig, ParallelConfig, TrainConfig
from branchnorm_jax.parallel.mesh import make_mesh
from branchnorm_jax.training.optimizer import make_optimizer
from branchnorm_jax.training.record import to_json_numbers
from branchnorm_jax.training.state import Batch, init_state
from branchnorm_jax.training.step import make_train_step
from branchnorm_jax.training.watch import collapsed, origin
from branchnorm_jax.workdir import Workdir
from tests.conftest import HASTY, run_main
from tests.reference import transformer as reference

MODEL = ModelConfig(method="post_ln", encoder_layers=3, decoder_layers=2, width=16, ffn_width=24, heads=2, dropout=0.0)
CONFIG = Config(model=MODEL, train=TrainConfig(steps=10, learning_rate=1e-2, schedule="constant", warmup_steps=0))
BATCH = Batch(
    jnp.array([[5, 6, 7, 1, 0, 0], [9, 8, 7, 6, 5, 1]] * 2), jnp.array([[4, 5, 6, 1, 0], [7, 8, 9, 3, 1]] * 2)
)


def with_train(**changes: Any) -> Config:
    return dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, **changes))


@functools.cache
def one_update(config: Config) -> tuple[Any, Any, Any, Transformer]:
    """Returns (state before, state after, metrics, model) of the first update."""
    model, optimizer = Transformer(config.model, 12, 12), make_optimizer(config.train)
    state = init_state(model, optimizer, make_mesh(ParallelConfig()), 0, BATCH)
    after, metrics = jax.jit(make_train_step(model, optimizer, config))(state, BATCH)
    return state, after, metrics, model


def test_gradient_and_update_of_every_layer() -> None:
    before, after, metrics, _ = one_update(CONFIG)
    moments = optax.tree.get(after.opt_state, "mu")
    for stack, layers in (("encoder", 3), ("decoder", 2)):
        for index in range(layers):

            def norm(tree: Any, stack: str = stack, index: int = index) -> float:
                parts = [np.asarray(leaf[index], np.float64).ravel() for leaf in jax.tree.leaves(tree[stack])]
                return float(np.linalg.norm(np.concatenate(parts)))

            change = jax.tree.map(jnp.subtract, after.params, before.params)
            np.testing.assert_allclose(
                metrics.layers[stack]["update"][index], norm(change) / norm(before.params), rtol=1e-3
            )
            # After the first update, the first moments equal the gradient times 1 - b1.
            np.testing.assert_allclose(metrics.layers[stack]["gradient"][index], norm(moments) / 0.1, rtol=1e-4)


def test_branch_cosine_and_sparsity_of_the_encoder() -> None:
    """Computes the expected values sub-layer by sub-layer in NumPy."""
    before, _, metrics, model = one_update(CONFIG)
    exact = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), before.params)
    mask = np.asarray(BATCH.source != 0)[:, None]
    positions = model.positions(before.params, "encoder", 6)[source_segments(BATCH.source).positions]
    x = np.asarray(model.embed_tokens(before.params, "encoder", BATCH.source, positions), np.float64)
    for index in range(3):
        p = jax.tree.map(lambda leaf, index=index: leaf[index], exact["encoder"])
        start, ratios = x, []
        for sublayer in ("self", "ffn"):
            if sublayer == "self":
                f = reference.attention(x, x, p["self"], mask, 2, None, False)
            else:
                hidden = np.maximum(x @ p["ffn"]["fc1"]["kernel"] + p["ffn"]["fc1"]["bias"], 0)
                f = hidden @ p["ffn"]["fc2"]["kernel"] + p["ffn"]["fc2"]["bias"]
            ratios.append(np.sqrt((f**2).mean() / (x**2).mean()))
            x = reference.ln(x + f, p[f"{sublayer}_post_norm"])
        cosines = (start * x).sum(-1) / np.linalg.norm(start, axis=-1) / np.linalg.norm(x, axis=-1)
        result = {name: float(values[index]) for name, values in metrics.layers["encoder"].items()}
        np.testing.assert_allclose(result["branch"], np.mean(ratios), rtol=1e-4)
        np.testing.assert_allclose(result["cosine"], cosines.mean(), rtol=1e-4)
        np.testing.assert_allclose(result["sparsity"], (hidden == 0).mean(), atol=1e-6)


def test_the_branch_of_block_attnres_is_finite() -> None:
    """Every layer begins a block, where the skip connection is 0: the mean is that of the other sub-layers."""
    model = dataclasses.replace(MODEL, method="block_attnres")
    _, _, metrics, _ = one_update(dataclasses.replace(CONFIG, model=model))
    for layers in metrics.layers.values():
        assert (layers["branch"] > 0).all() and np.isfinite(layers["branch"]).all()
    assert origin(jax.device_get(metrics.layers)) == ""


def test_similarity_is_the_mean_cosine_of_pairs_within_a_sentence() -> None:
    """Rows hold one or two sentences and padding. NumPy computes each pair, for the encoder and decoder masks."""
    inputs = jnp.array([[1, 5, 6, 1, 7, 8, 9, 0], [1, 4, 3, 2, 0, 0, 0, 0]])
    segments = target_segments(inputs)
    x = np.random.default_rng(0).normal(0.5, 1, (2, 8, 6)).astype(np.float32)
    sentences = [(0, range(0, 3)), (0, range(3, 7)), (1, range(0, 4))]
    cosines = [
        x[row, i] @ x[row, j] / np.linalg.norm(x[row, i]) / np.linalg.norm(x[row, j])
        for row, tokens in sentences
        for i, j in itertools.combinations(tokens, 2)
    ]
    whole = same_sentence(segments, segments)
    for mask, times in ((whole, 2), (whole & causal_mask(8), 1)):
        result = similarity(jnp.asarray(x), mask)
        assert float(result["pairs"].sum()) == times * len(cosines)
        np.testing.assert_allclose(result["similarity"].sum() / result["pairs"].sum(), np.mean(cosines), rtol=1e-5)


@pytest.mark.parametrize(
    ("last", "description"),
    [
        ({"encoder": 0.2, "decoder": 0.3}, ""),
        ({"encoder": 0.995, "decoder": 0.3}, ""),
        ({"encoder": 0.9998, "decoder": 0.3}, "the encoder (similarity 0.9998)"),
        ({"encoder": 0.9995, "decoder": 1.0}, "the encoder (similarity 0.9995) and the decoder (similarity 1.0000)"),
    ],
)
def test_stacks_with_nearly_equal_tokens_are_collapsed(last: dict[str, float], description: str) -> None:
    """Only the output of a stack counts, because tokens in lower layers may be similar for a while."""
    layers = {stack: {"similarity": np.array([1.0, value])} for stack, value in last.items()}
    assert collapsed(layers) == description


def test_accumulation_averages_the_microbatches() -> None:
    _, _, whole, _ = one_update(CONFIG)
    _, _, parts, _ = one_update(with_train(accumulation=2))
    for stack in ("encoder", "decoder"):
        np.testing.assert_allclose(parts.layers[stack]["gradient"], whole.layers[stack]["gradient"], rtol=1e-4)
        for name in ("branch", "cosine", "sparsity", "similarity"):
            np.testing.assert_allclose(parts.layers[stack][name], whole.layers[stack][name], rtol=1e-5)


def test_layer_updates_are_multiplied_by_a_power_of_alpha() -> None:
    """The factor uses the alpha of each layer. Gradients, moments and other parameters do not change."""
    model = dataclasses.replace(MODEL, method="branchnorm", alpha_steps=8, alpha_order="linear")
    network = Transformer(model, 12, 12)
    optimizer = make_optimizer(CONFIG.train)
    state = init_state(network, optimizer, make_mesh(ParallelConfig()), 0, BATCH)
    state = dataclasses.replace(state, clock=jnp.int32(2))
    alpha = {"encoder": [2 / 8 * 3, 2 / 8 * 3 / 2, 2 / 8], "decoder": [2 / 8 * 2, 2 / 8]}

    def update(power: float) -> Any:
        config = dataclasses.replace(with_train(branch_update_power=power), model=model)
        return jax.jit(make_train_step(network, optimizer, config))(state, BATCH)

    (plain, _), (scaled, metrics) = update(0.0), update(3.0)
    jax.tree.map(np.testing.assert_array_equal, scaled.opt_state, plain.opt_state)
    np.testing.assert_array_equal(scaled.params["embedding"]["shared"], plain.params["embedding"]["shared"])
    for stack, values in alpha.items():
        factor = np.array(values) ** 3
        np.testing.assert_allclose(metrics.layers[stack]["alpha"], values, rtol=1e-6)
        for before, whole, part in zip(
            *(jax.tree.leaves(tree.params[stack]) for tree in (state, plain, scaled)), strict=True
        ):
            scale = factor.reshape(-1, *(1,) * (before.ndim - 1))
            np.testing.assert_allclose(part - before, scale * (whole - before), atol=2e-7)


def test_watching_changes_no_metric_and_can_be_disabled() -> None:
    _, _, on, _ = one_update(CONFIG)
    _, _, off, _ = one_update(with_train(watch_every=0))
    assert off.layers == {}
    np.testing.assert_allclose(on._replace(layers={})[:-1], off[:-1], rtol=1e-6)


def test_run_logs_and_plots_its_layers(trained: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (trained / "layers.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 100, 119]
    config = json.loads((trained / "config.json").read_text())["model"]
    for line in lines:
        for stack in ("encoder", "decoder"):
            assert {len(values) for values in line[stack].values()} == {config[f"{stack}_layers"]}
            statistics = {name for name in line[stack] if not name.startswith("factor/")}
            assert statistics == {"gradient", "update", "branch", "cosine", "sparsity", "similarity"}
    # BranchNorm's branches are closed in the first update and open later.
    assert set(lines[0]["encoder"]["branch"]) == {0.0}
    assert min(lines[-1]["encoder"]["branch"]) > 0
    # Non-finite values are null in the file, and the plot accepts them.
    lines[1]["encoder"]["gradient"] = [None] * config["encoder_layers"]
    (tmp_path / "layers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert draw_layers(Workdir(tmp_path)).read_bytes().startswith(b"\x89PNG")


def test_nonfinite_values_are_null() -> None:
    assert to_json_numbers(jnp.array([1.23456, jnp.nan, jnp.inf, 0.0])) == [1.235, None, None, 0.0]


class Poisoned(Transformer):
    """A network that returns NaN as decoder output for batches that begin with word 11."""

    def hidden(self, params: Any, source_BS: jax.Array, *arguments: Any, **options: Any) -> Any:
        x, by_layer = super().hidden(params, source_BS, *arguments, **options)
        return x * jnp.where(source_BS[0, 0] == 11, jnp.nan, 1.0), by_layer


def test_skipped_updates_change_only_the_step() -> None:
    config = with_train(nonfinite="skip")
    model, optimizer = Poisoned(config.model, 12, 12), make_optimizer(config.train)
    state = init_state(model, optimizer, make_mesh(ParallelConfig()), 0, BATCH)
    step = jax.jit(make_train_step(model, optimizer, config))
    good, metrics = step(state, BATCH)
    assert np.isfinite(float(metrics.grad_norm))
    same, metrics = step(good, BATCH._replace(source=BATCH.source.at[0, 0].set(11)))
    assert not np.isfinite(float(metrics.loss))
    assert int(same.step) == 2
    jax.tree.map(np.testing.assert_array_equal, same.params, good.params)
    jax.tree.map(np.testing.assert_array_equal, same.opt_state, good.opt_state)
    # The first update equals the update of a step without this check.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), good.params, one_update(CONFIG)[1].params)


@pytest.mark.parametrize(
    ("broken", "description"),
    [
        ({}, ""),
        ({("encoder", "branch"): [1], ("decoder", "branch"): [0, 1]}, "forward pass of encoder layer 2"),
        ({("decoder", "branch"): [1], ("encoder", "gradient"): [0, 1, 2]}, "forward pass of decoder layer 2"),
        ({("decoder", "gradient"): [0], ("encoder", "gradient"): [0, 1, 2]}, "backward pass of decoder layer 1"),
        ({("encoder", "gradient"): [0, 1]}, "backward pass of encoder layer 2"),
    ],
)
def test_origin_names_the_first_broken_layer(broken: dict[tuple[str, str], list[int]], description: str) -> None:
    layers = {
        stack: {name: np.ones(depth) for name in ("branch", "gradient")}
        for stack, depth in (("encoder", 3), ("decoder", 2))
    }
    for (stack, name), places in broken.items():
        layers[stack][name][places] = np.nan
    for given in (layers, jax.jit(lambda tree: tree)(layers)):  # which has other keys first
        result = origin(jax.device_get(given))
        assert result.endswith(description) if description else result == ""


@pytest.mark.slow
def test_runs_that_skip_all_updates_end(tmp_path: Path) -> None:
    """At this learning rate no update is finite."""
    done = run_main(
        *HASTY,
        f"--workdir={tmp_path}",
        "--config.train.steps=40",
        "--config.train.learning_rate=1e38",
        "--config.train.warmup_steps=0",
        "--config.train.nonfinite=skip",
        "--config.train.checkpoint_every=0",
        "--config.train.eval_every=0",
    )
    assert done.returncode == 3
    assert "10 updates in a row" in done.stderr.splitlines()[-1]
    assert "coder layer" in done.stderr.splitlines()[-1]
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["status"], status["skipped_updates"]) == ("diverged", 10)
