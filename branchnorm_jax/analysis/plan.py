"""What a run will cost, before anything is allocated."""

import json
from typing import Any

import jax

from branchnorm_jax.model.stack import size_of
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import Config
from branchnorm_jax.training.optimizer import make_optimizer


def forward_flops(config: Config, source_length: float, target_length: float, vocabulary: int) -> dict[str, float]:
    """Multiplications and additions of a forward pass per pair of one source and one target token, by part.

    Matrix products and attention scores are counted, 2 operations per multiply-add; norms, softmax and embeddings are
    not. Lengths are the average sentence's, in tokens: a query meets all source tokens, and half of the target's.
    """
    m = config.model
    d, f = m.width, m.ffn_width
    feed_forward = (6 if m.activation == "swiglu" else 4) * d * f
    scores = 4 * d
    return {
        "encoder": m.encoder_layers * (8 * d * d + feed_forward + scores * source_length),
        "decoder": m.decoder_layers * (16 * d * d + feed_forward + scores * (target_length / 2 + source_length)),
        "output": 2 * d * vocabulary,
    }


def recomputed_flops(config: Config, forward: dict[str, float], source_length: float, target_length: float) -> float:
    """What the backward pass computes again, per pair of tokens: see the table of `run_stack`."""
    m = config.model
    if m.remat == "save_branches":
        hidden = (4 if m.activation == "swiglu" else 2) * m.width * m.ffn_width
        scores = 2 * m.width
        encoder = m.encoder_layers * (hidden + scores * source_length)
        return encoder + m.decoder_layers * (hidden + scores * (target_length / 2 + source_length))
    return {"none": 0, "full": 1, "nested": 2}[m.remat] * (forward["encoder"] + forward["decoder"])


def make_plan(config: Config, length: float = 32.0) -> dict[str, Any]:
    """Parameters, operations and bytes of a config, from shapes alone.

    Args:
      config: the run.
      length: average sentence length in tokens, both sides, for the attention's operations.
    """
    vocabulary = config.data.vocab_size
    model = Transformer(config.model, vocabulary, vocabulary)
    params = model.abstract_params()
    opt_state = jax.eval_shape(make_optimizer(config.train).init, params)

    def count(tree: Any) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(tree))

    by_part = {name: count(part) for name, part in params.items()}
    flops = forward_flops(config, length, length, vocabulary)
    recomputed = recomputed_flops(config, flops, length, length)
    return {
        "parameters": count(params),
        "non_embedding_parameters": count(params) - by_part["embedding"],
        "parameters_by_part": by_part,
        "forward_flops_by_part": flops,
        "flops_per_target_token": 3 * sum(flops.values()) + recomputed,
        "parameter_bytes": size_of(params),
        "optimizer_bytes": size_of(opt_state),
        "gradient_bytes": size_of(params),
        "state_bytes": size_of(params) + size_of(opt_state),
        "sentence_length": length,
    }


def format_plan(config: Config, plan: dict[str, Any]) -> str:
    """One screen of table."""
    m, batch_tokens = config.model, config.train.batch_tokens
    depth, length = f"{m.encoder_layers}L-{m.decoder_layers}L", plan["sentence_length"]
    flops = plan["flops_per_target_token"]
    gb = {name: plan[f"{name}_bytes"] / 1e9 for name in ("state", "parameter", "optimizer", "gradient")}
    parts = ", ".join(f"{name} {number:,}" for name, number in plan["parameters_by_part"].items())
    rows = [
        ("model", f"{m.method} {depth}, width {m.width}/{m.ffn_width}, {m.heads} heads"),
        ("parameters", f"{plan['parameters']:,} ({plan['non_embedding_parameters']:,} without embeddings)"),
        ("", parts),
        ("training", f"{flops / 1e6:,.1f} MFLOP per target token at {length:g} tokens a sentence"),
        ("", f"{flops * batch_tokens / 1e12:,.3f} TFLOP per update of {batch_tokens:,} tokens"),
        ("state", f"{gb['state']:,.3f} GB: parameters {gb['parameter']:,.3f}, optimiser {gb['optimizer']:,.3f}"),
        ("gradients", f"{gb['gradient']:,.3f} GB during the update"),
    ]
    return "\n".join(f"{name:<12}{text}" for name, text in rows)


def to_json(plan: dict[str, Any]) -> str:
    """plan.json."""
    return json.dumps(plan, indent=2) + "\n"
