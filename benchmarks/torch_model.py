"""Our Post-LN Transformer with shared embeddings, built from PyTorch's own layers.

Source, target and output share one table. Positions are sinusoids.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from branchnorm_jax.model.embedding import sinusoids
from branchnorm_jax.options import ModelConfig
from branchnorm_jax.tokens import EOS, PAD

POSITIONS = 1024


class Network(nn.Module):
    """Logits of target words given the source and the previous words, as `Transformer.__call__` with alpha = 1."""

    positions: Tensor
    """Sinusoids, [POSITIONS, D]."""

    def __init__(self, config: ModelConfig, vocabulary: int) -> None:
        super().__init__()
        size: dict[str, Any] = dict(
            d_model=config.width,
            nhead=config.heads,
            dim_feedforward=config.ffn_width,
            dropout=config.dropout,
            batch_first=True,
        )
        self.table = nn.Embedding(vocabulary, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(**size) for _ in range(config.encoder_layers))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(**size) for _ in range(config.decoder_layers))
        places = torch.from_numpy(sinusoids(POSITIONS, config.width, config.positions))
        self.register_buffer("positions", places, persistent=False)
        # These layers drop attention probabilities and hidden units at the rate of the branches.
        for module in self.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = config.attention_dropout
            if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
                module.dropout = nn.Dropout(config.activation_dropout)

    def forward(self, source: Tensor, target: Tensor, padded: bool = True) -> Tensor:
        """Returns logits [B, T, V] for token ids [B, S] and [B, T], padded on the right.

        `padded` says whether to look for padding, for which a GPU would have to be waited for.
        """
        # No mask unless it is needed, because PyTorch uses its fused attention only without masks.
        padding = source == PAD
        mask = padding if padded and bool(padding.any()) else None
        memory = self.embed(source)
        for layer in self.encoder:
            memory = layer(memory, src_key_padding_mask=mask)
        x = self.embed(torch.cat([torch.full_like(target[:, :1], EOS), target[:, :-1]], dim=1))
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        for layer in self.decoder:
            x = layer(x, memory, tgt_mask=causal, tgt_is_causal=True, memory_key_padding_mask=mask)
        return nn.functional.linear(x, self.table.weight)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeds token ids: [B, T] -> [B, T, D]."""
        width = self.table.embedding_dim
        return self.dropout(self.table(tokens) * width**0.5 + self.positions[: tokens.shape[1]])

    def loss(self, source: Tensor, target: Tensor, smoothing: float, padded: bool = True) -> Tensor:
        """Returns the mean loss over real target tokens, in nats.

        PyTorch spreads eps over all V tokens, fairseq and we over V - 1, so eps is scaled by V / (V - 1).
        """
        logits = self(source, target, padded)
        words = logits.shape[-1]
        return nn.functional.cross_entropy(
            logits.flatten(0, 1),
            target.flatten(),
            ignore_index=PAD,
            label_smoothing=smoothing * words / (words - 1),
        )

    def load(self, params: Mapping[str, Any]) -> None:
        """Takes over the parameters of a Post-LN or BranchNorm `Transformer` with one table."""
        self.load_state_dict(dict(_named(params)))


def _named(params: Mapping[str, Any]) -> Iterable[tuple[str, Tensor]]:
    """Yields our parameters under PyTorch's names, with matrices transposed, and q, k and v concatenated."""

    def tensor(array: Any) -> Tensor:
        return torch.tensor(np.asarray(array))

    yield "table.weight", tensor(params["embedding"]["shared"])
    attentions = {"self": "self_attn", "cross": "multihead_attn"}
    for stack in ("encoder", "decoder"):
        layers = params[stack]
        present = [sub for sub in ("self", "cross", "ffn") if sub in layers]
        for index in range(len(layers["ffn"]["fc1"]["bias"])):
            name = f"{stack}.{index}"
            for number, sub in enumerate(present, start=1):
                norm = layers[f"{sub}_post_norm"]
                yield f"{name}.norm{number}.weight", tensor(norm["scale"][index])
                yield f"{name}.norm{number}.bias", tensor(norm["bias"][index])
                kernels = {role: tensor(linear["kernel"][index]).T for role, linear in layers[sub].items()}
                biases = {role: tensor(linear["bias"][index]) for role, linear in layers[sub].items()}
                if sub == "ffn":
                    for role, theirs in (("fc1", "linear1"), ("fc2", "linear2")):
                        yield f"{name}.{theirs}.weight", kernels[role]
                        yield f"{name}.{theirs}.bias", biases[role]
                else:
                    theirs = f"{name}.{attentions[sub]}"
                    yield f"{theirs}.in_proj_weight", torch.cat([kernels[role] for role in "qkv"])
                    yield f"{theirs}.in_proj_bias", torch.cat([biases[role] for role in "qkv"])
                    yield f"{theirs}.out_proj.weight", kernels["o"]
                    yield f"{theirs}.out_proj.bias", biases["o"]
