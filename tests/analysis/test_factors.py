"""The learned factors of the layers: layers.jsonl against the parameters of checkpoints, and both figures."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from branchnorm_jax.analysis import sweep_curves
from branchnorm_jax.analysis.report import draw_factors, layer_lines
from branchnorm_jax.errors import UserError
from branchnorm_jax.options import Config, DataConfig, DecodeConfig, ModelConfig, TrainConfig
from branchnorm_jax.training import loop
from branchnorm_jax.training.trained import restore
from branchnorm_jax.workdir import Workdir

SHAPE: dict[str, Any] = {"encoder_layers": 3, "decoder_layers": 2, "width": 16, "ffn_width": 24, "heads": 2}
CONFIG = Config(
    model=ModelConfig(method="layerscale", norm="scale_norm", value_residual=True, **SHAPE),
    data=DataConfig(numerals_pairs=200, vocab_size=300, max_length=128, batch_shapes=1),
    train=TrainConfig(
        steps=5,
        batch_tokens=512,
        learning_rate=1e-2,
        schedule="constant",
        warmup_steps=0,
        eval_every=0,
        eval_bleu_sentences=0,
        best_metric="loss",
        checkpoint_every=2,
        keep_last=5,
        watch_every=2,
        log_every=1,
    ),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Workdir:
    """The workdir of five updates."""
    workdir = Workdir(tmp_path_factory.mktemp("factors"))
    loop.train(CONFIG, workdir)
    return workdir


@pytest.mark.slow
def test_factors_are_the_parameters_before_the_update(run: Workdir) -> None:
    """g starts at sqrt(D), shares at 0.5; later values are those of the checkpoint of the same step."""
    lines = {line["step"]: line for line in layer_lines(run)}
    assert list(lines) == [0, 2, 4]
    assert lines[0]["decoder"]["factor/cross_pre_norm/scale"] == [4.0, 4.0]
    assert lines[0]["encoder"]["factor/value_shares/2"] == [0.5, 0.5, 0.5]
    for step in (2, 4):
        config = dataclasses.replace(CONFIG, decode=DecodeConfig(checkpoint=str(step)))
        params = restore(config, run).params
        for stack, sublayers in (("encoder", ("ffn", "self")), ("decoder", ("cross", "ffn", "self"))):
            own = params[stack]
            expected = {f"factor/{name}_branch": np.mean(own[f"{name}_branch"], axis=1) for name in sublayers}
            expected |= {f"factor/{name}_pre_norm/scale": own[f"{name}_pre_norm"]["scale"] for name in sublayers}
            expected |= {f"factor/value_shares/{index + 1}": own["value_shares"][:, index] for index in range(2)}
            found = {name: values for name, values in lines[step][stack].items() if name.startswith("factor/")}
            assert found.keys() == expected.keys()
            for name, values in expected.items():
                np.testing.assert_allclose(found[name], values, rtol=1e-3)  # The file has four digits.
                assert np.any(np.asarray(values) != lines[0][stack][name]), name


@pytest.mark.slow
def test_figure_of_factors(run: Workdir, tmp_path: Path) -> None:
    assert draw_factors(run).read_bytes().startswith(b"\x89PNG")
    lines = layer_lines(run)
    for line in lines:
        line["encoder"] = {name: values for name, values in line["encoder"].items() if "factor/" not in name}
    # An early line without factors, as in a run that an earlier version began; and an encoder without any.
    lines[0]["decoder"] = lines[0]["encoder"]
    (tmp_path / "layers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert draw_factors(Workdir(tmp_path)).read_bytes().startswith(b"\x89PNG")
    (tmp_path / "layers.jsonl").write_text(json.dumps(lines[0]) + "\n")
    with pytest.raises(UserError, match="no learned factors"):
        draw_factors(Workdir(tmp_path))


@pytest.mark.slow
def test_runs_of_a_sweep_over_time(run: Workdir, tmp_path: Path) -> None:
    curves = sweep_curves.panels(run)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for field in ("nll", "grad_norm"):
        assert curves[field] == ([0, 1, 2, 3, 4], [line[field] for line in metrics])
    last = layer_lines(run)[-1]
    assert curves["decoder: ffn_branch"] == (range(1, 3), last["decoder"]["factor/ffn_branch"])
    assert len(curves) == 2 + 6 + 8
    # A diverged run has values that are not finite, and one that has not begun has no files.
    broken = tmp_path / "broken"
    shutil.copytree(run.path, broken, ignore=shutil.ignore_patterns("checkpoints", "corpus"))
    metrics[-1]["grad_norm"] = None
    (broken / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    folders = {"a": ({"method": "layerscale", "train.seed": "0"}, run), "b": ({"method": "rezero"}, Workdir(broken))}
    folders["c"] = {"method": "post_ln"}, Workdir(tmp_path / "none")
    sweep_curves.draw(folders, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    sweep_curves.draw({"c": folders["c"]}, tmp_path / "nothing.png")
    assert not (tmp_path / "nothing.png").exists()
