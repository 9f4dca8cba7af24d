"""Verdicts of the preflight check, and the check itself on models that are known to train or to fail."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from branchnorm_jax.analysis import preflight
from branchnorm_jax.analysis.preflight import Point, judge, points_of, reduced
from branchnorm_jax.model import growth
from branchnorm_jax.options import Config, ModelConfig, TrainConfig
from branchnorm_jax.training import schedules
from branchnorm_jax.training.watch import vanishing, weak_layers
from tests.conftest import TINY, run_main


def point(
    loss: list[float], decoder: list[float], alpha: float = 0.5, similarity: float = 0.2, in_decoder: float = 0.1
) -> Point:
    layers = {"encoder": np.ones(4), "decoder": np.array(decoder)}
    alike = {"encoder": np.array([0.1, 1.0, 0.5, similarity]), "decoder": np.full(4, in_decoder)}
    return Point(7, alpha, None, 1e-3, loss, [0.1, 0.2], layers, layers, alike, layers, 1.0)


def test_verdicts() -> None:
    good = point([5.0, 4.9, 4.5], [0.1, 0.2, 1.0, 0.5])
    assert judge([good, good]).word == "healthy"
    assert judge([good, point([4.5, 4.6, 5.2], [1.0] * 4)]).word == "diverging"
    assert judge([good, point([4.5, float("nan"), 4.0], [1.0] * 4)]).word == "diverging"
    weak = point([4.5, 4.4, 4.3], [1e-5, 1e-4, 1.0, 1e-6])
    word, reason = judge([good, weak, good])
    assert word == "vanishing"
    assert "decoder layers 1-2, 4 of 4 at update 7" in reason
    assert "1e-06 of the largest" in reason
    # At the last point, an untrained model has weak layers even if the run itself would not.
    assert judge([good, weak]).word == "healthy"
    assert judge([weak]).word == "vanishing"
    # A gradient of 0 in all layers is not vanishing: the encoder has it while BranchNorm's alpha is 0.
    assert judge([point([5.0, 4.9, 4.5], [0.0] * 4)]).word == "healthy"
    assert judge([point([5.0, 5.0, 4.9999], [1.0] * 4)]).word == "still"
    assert judge([point([5.0, 4.9, 4.5], [float("nan")] * 4)]).word == "diverging"


def test_similar_tokens_with_growing_branches_are_collapsing() -> None:
    alike = point([5.0, 4.9, 4.5], [1.0] * 4, 0.5, 0.995)
    full = point([4.5, 4.4, 4.3], [1.0] * 4, alpha=1.0)._replace(step=9, learning_rate=2e-3)
    word, reason = judge([alike, full])
    assert word == "collapsing"
    assert "at update 7" in reason
    assert "the encoder (similarity 0.9950)" in reason
    # If the branches do not grow, the encoder recovers, as DeepNorm's does.
    assert judge([alike, full._replace(alpha=0.5)]).word == "healthy"
    # From the peak of the learning rate on, the decoder reads the encoder, which does not collapse any more.
    early = point([5.0, 4.9, 4.5], [1.0] * 4, 0.1)._replace(step=3, learning_rate=2e-3)
    assert judge([early, alike, full]).word == "healthy"
    # The decoder counts only in a language model.
    decoder = point([5.0, 4.9, 4.5], [1.0] * 4, 0.5, in_decoder=0.995)
    assert judge([decoder, full]).word == "healthy"
    alone = decoder._replace(similarity={"decoder": decoder.similarity["decoder"]})
    assert judge([alone, full]).word == "collapsing"
    # Only the output of a stack counts.
    assert judge([point([5.0, 4.9, 4.5], [1.0] * 4), full]).word == "healthy"


def test_vanishing_names_the_stack_with_many_weak_layers() -> None:
    gradient = {"encoder": np.r_[np.zeros(1), np.ones(19)], "decoder": np.r_[np.full(3, 1e-4), np.ones(17)]}
    assert weak_layers(gradient) == {"encoder": [1], "decoder": [1, 2, 3]}
    assert vanishing(gradient) == "decoder layers 1-3 of 20"
    for broken in (np.inf, np.nan):
        assert vanishing({"encoder": np.array([broken, 1e18, 1e18])}) == ""


def test_preflight_points_follow_the_schedules_of_the_run() -> None:
    """The points include the full alpha and the peak learning rate, or the end of the run."""
    config = Config(train=TrainConfig(warmup_steps=1000), model=ModelConfig(alpha_steps=4000))
    points = points_of(config, 100_000)
    assert points == [0, 400, 1000, 2000, 4000]
    assert all((values == 1).all() for values in growth.alpha(config.model)(jnp.int32(points[-1])).values())
    assert schedules.learning_rate(config.train, 64)(jnp.int32(1000)) == pytest.approx(config.train.learning_rate)
    assert points_of(config, 510) == [0, 50, 250, 500]


def test_narrow_model_has_the_same_noam_learning_rate() -> None:
    config = Config(train=TrainConfig(schedule="noam", learning_rate=2.0), model=ModelConfig(width=512))
    narrow = reduced(config)
    rates = [schedules.learning_rate(c.train, c.model.width)(jnp.int32(4000)) for c in (config, narrow)]
    assert narrow.model.width == 64
    assert float(rates[0]) == pytest.approx(float(rates[1]))


@pytest.mark.parametrize(("width", "heads", "narrow"), [(512, 8, (64, 8)), (1024, 16, (64, 8)), (24, 6, (24, 6))])
def test_narrow_model_keeps_depth_and_proportions(width: int, heads: int, narrow: tuple[int, int]) -> None:
    model = ModelConfig(encoder_layers=7, decoder_layers=3, width=width, ffn_width=4 * width, heads=heads)
    result = reduced(Config(model=model)).model
    assert (result.width, result.heads) == narrow
    assert result.ffn_width == 4 * result.width
    assert (result.encoder_layers, result.decoder_layers, result.method) == (7, 3, "branchnorm")


def test_narrow_heads_can_be_rotated() -> None:
    """10 heads of width 50 become 8 of width 7, and rotary positions need an even width."""
    model = ModelConfig(width=512, heads=10, head_width=50, positions="rotary")
    narrow = reduced(Config(model=model)).model
    assert (narrow.heads, narrow.head_width) == (8, 8)
    plain = dataclasses.replace(model, width=40, heads=8, head_width=5, positions="sinusoidal")
    assert reduced(Config(model=plain)).model.head_width == 5


@pytest.mark.slow
@pytest.mark.parametrize(("method", "word"), [("post_ln", "vanishing"), ("deepnorm", "healthy")])
def test_preflight_finds_post_ln_vanishing_and_deepnorm_healthy(method: str, word: str, tmp_path: Path) -> None:
    done = run_main(
        TINY[0].replace("2L-2L", "30L-30L"), *TINY[1:], "--mode=preflight", f"--workdir={tmp_path}",
        f"--config.model.method={method}", "--config.train.learning_rate=1e-3", "--config.train.warmup_steps=40",
        "--config.train.schedule=polynomial", "--config.train.decay_steps=0",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "preflight.json").read_text())
    assert report["word"] == word
    assert f"{word}: " in done.stdout
    # 120 updates with a peak at update 40.
    for measured in report["points"]:
        expected = 1e-3 * min(measured["step"] / 40, (120 - measured["step"]) / 80)
        assert measured["learning_rate"] == pytest.approx(expected, abs=1e-6)
    assert [len(point["gradient"]["decoder"]) for point in report["points"]] == [30] * len(report["points"])
    assert (tmp_path / "preflight.png").read_bytes().startswith(b"\x89PNG")


def test_share_of_gradients_below_adam_epsilon() -> None:
    """Leaves of different shapes count by their number of elements."""
    tree = {"a": jnp.array([[0.0, 1.0], [1.0, 1.0]]), "b": jnp.array([0.0, 0.0])}
    small = preflight._by_layer(lambda g: (jnp.abs(g) < 1e-8).sum(), tree)
    assert (small / preflight._by_layer(jnp.size, tree)).tolist() == pytest.approx([2 / 3, 1 / 3])
