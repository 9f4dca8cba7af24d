"""A decoder-only Transformer in PyTorch, in the style of GPT-2: Pre-LN, learned positions, GELU, tied output table.

Written from the description in *Language Models are Unsupervised Multitask Learners* (Radford et al., 2019): weights
from N(0, 0.02), those of the last matrix of each branch divided by sqrt(2 L), biases 0.
"""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Layer(nn.Module):
    """x + attention(LN(x)), then x + mlp(LN(x))."""

    def __init__(self, width: int, ffn_width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, ffn_width), nn.Linear(ffn_width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, D] -> [B, T, D]."""
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(heads.transpose(1, 2).reshape(rows, length, width))
        return x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))


class GPT(nn.Module):
    """A language model: token ids [B, T] -> logits of the next tokens [B, T, V].

    `scale` multiplies the embeddings of tokens; it is 1 in GPT-2, and sqrt(D) in this project.
    """

    def __init__(
        self, vocabulary: int, context: int, layers: int, width: int, ffn_width: int, heads: int, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.scale = scale
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.layers: Any = nn.ModuleList(Layer(width, ffn_width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        last: Any
        for last in (matrix for layer in self.layers for matrix in (layer.o, layer.fc2)):
            nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * layers))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns the logits."""
        x = self.scale * self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.tokens.weight.T


def load(model: Any, params: Any) -> None:
    """Copies the parameters of a Pre-LN model of this project, with learned positions, into a `GPT`."""
    width = model.tokens.weight.shape[1]

    def put(target: torch.Tensor, value: Any) -> None:
        target.data.copy_(torch.tensor(value.tolist()))

    put(model.tokens.weight, params["embedding"]["shared"])
    put(model.positions.weight, params["embedding"]["decoder_positions"][: len(model.positions.weight)])
    put(model.norm.weight, params["decoder_norm"]["scale"])
    put(model.norm.bias, params["decoder_norm"]["bias"])
    tree = params["decoder"]
    for index, layer in enumerate(model.layers):
        for norm, name in ((layer.norm1, "self_pre_norm"), (layer.norm2, "ffn_pre_norm")):
            put(norm.weight, tree[name]["scale"][index])
            put(norm.bias, tree[name]["bias"][index])
        matrices = {"o": (layer.o, "self"), "fc1": (layer.fc1, "ffn"), "fc2": (layer.fc2, "ffn")}
        for name, (linear, branch) in matrices.items():
            put(linear.weight, tree[branch][name]["kernel"][index].T)
            put(linear.bias, tree[branch][name]["bias"][index])
        for place, name in enumerate("qkv"):
            rows = slice(place * width, (place + 1) * width)
            put(layer.qkv.weight[rows], tree["self"][name]["kernel"][index].T)
            put(layer.qkv.bias[rows], tree["self"][name]["bias"][index])
