"""A decoder-only model against one in PyTorch: the same updates from the same start."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branchnorm_jax.config import from_config_dict
from branchnorm_jax.data.batches import BatchPlan, make_plans
from branchnorm_jax.data.prepare import prepare
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import Config
from branchnorm_jax.training.optimizer import make_optimizer
from branchnorm_jax.training.state import Batch, first_state
from branchnorm_jax.training.step import make_train_step
from configs import lm

ROOT = Path(__file__).parents[2]


def config_of(layers: int, folder: Path, **options: Any) -> Config:
    """Returns a Pre-LN model of GPT-2's kind on the bytes of a folder."""
    config = lm.get_config(f"{layers}L")
    chosen = {
        "model.method": "pre_ln",
        "model.positions": "learned",
        "model.activation": "gelu",
        "model.width": 64,
        "model.ffn_width": 256,
        "data.path": str(folder),
        "data.files": "*.txt",
        "data.context": 64,
        "train.batch_tokens": 1024,
        "train.learning_rate": 3e-3,
        "train.warmup_steps": 20,
        "train.optimizer": "adam",
        "train.adam_b2": 0.99,
        "train.weight_decay": 0.0,
        "train.schedule": "constant",
    }
    for name, value in (chosen | options).items():
        section, option = name.split(".")
        config[section][option] = value
    return from_config_dict(config)


def our_losses(config: Config, plan: BatchPlan, updates: int) -> tuple[Transformer, Any, list[float]]:
    """Returns the network, its initial parameters, and the nll before each update."""
    model, optimizer = Transformer(config.model, 259, 259), make_optimizer(config.train)
    params = model.init(jax.random.key(0))
    first = jax.tree.map(np.asarray, params)
    update: Any = jax.jit(make_train_step(model, optimizer, config))
    state, losses = first_state(params, optimizer), []
    for step in range(updates):
        state, metrics = update(state, Batch(*map(jnp.asarray, plan.batch_at(step))))
        losses.append(float(metrics.nll))
    return model, first, losses


def their_losses(config: Config, plan: BatchPlan, updates: int, model: Any) -> list[float]:
    """Trains a PyTorch model on the same batches at the same rates; returns the nll before each update."""
    import torch

    train, losses = config.train, []
    adam = torch.optim.Adam(model.parameters(), betas=(train.adam_b1, train.adam_b2), eps=train.adam_eps)
    for step in range(updates):
        inputs, targets = (torch.tensor(side, dtype=torch.long) for side in plan.batch_at(step))
        # Only the last row of a text is not full.
        loss = torch.nn.functional.cross_entropy(model(inputs).transpose(1, 2), targets, ignore_index=0)
        warm = min(1.0, step / train.warmup_steps)
        adam.param_groups[0]["lr"] = train.warmup_init + warm * (train.learning_rate - train.warmup_init)
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(float(loss.detach()))
    return losses


def plan_of(config: Config, directory: Path) -> BatchPlan:
    corpus = prepare(config.data, directory, lambda line: None)
    return make_plans(config.data, corpus.train, corpus.valid, config.train.batch_tokens, config.train.seed)[0]


def documentation(folder: Path) -> Path:
    """Writes the text of the documentation into a folder, as one document: the model in PyTorch knows no borders."""
    folder.mkdir()
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("docs/*.md")))
    (folder / "all.txt").write_text(text, encoding="utf-8")
    return folder


def test_the_same_updates_as_pytorch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from tests.reference import gpt

    sizes = {"model.width": 16, "model.ffn_width": 24, "model.heads": 2}
    config = config_of(3, documentation(tmp_path / "text"), **sizes)
    plan = plan_of(config, tmp_path)
    _, params, ours = our_losses(config, plan, 12)
    theirs = gpt.GPT(259, 1024, 3, 16, 24, 2, scale=4.0)
    gpt.load(theirs, params)
    np.testing.assert_allclose(ours, their_losses(config, plan, 12, theirs), rtol=2e-4)
    assert ours[-1] < ours[0] - 0.2


@pytest.mark.slow
def test_a_model_of_12_layers_learns_as_pytorchs(tmp_path: Path) -> None:
    """Rounding errors grow over 300 updates, but the losses stay together."""
    pytest.importorskip("torch")
    from tests.reference import gpt

    config = config_of(12, documentation(tmp_path / "text"))
    plan = plan_of(config, tmp_path)
    _, params, ours = our_losses(config, plan, 300)
    theirs = gpt.GPT(259, 1024, 12, 64, 256, 4, scale=8.0)
    gpt.load(theirs, params)
    last = [float(np.mean(losses[-50:])) for losses in (ours, their_losses(config, plan, 300, theirs))]
    assert last[0] == pytest.approx(last[1], rel=0.02)
    assert last[1] < ours[0] / 2
