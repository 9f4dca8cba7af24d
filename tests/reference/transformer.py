"""Every method's forward pass in NumPy, one layer after the other, each sub-layer as its paper prints it.

float64 for values, complex128 for derivatives: all functions are analytic where they are used, so the derivative of f
in direction v is Im f(x + i h v) / h, exact to rounding (complex-step differentiation; no autodiff, no differences).

The reference shares only the parameter tree with the code under test. The first axis of a layer's parameters is the
layer.
"""

import collections
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy.special import erf

from tests.reference.streams import STREAMS

Params = dict[str, Any]
Branch = Callable[[np.ndarray], np.ndarray]


class At(NamedTuple):
    """Position of a sub-layer in the network, and the current alpha."""

    stack: str
    sub: str
    """self, cross or ffn."""
    l: int
    """Layer, counted from 1."""
    N: int
    M: int
    alpha: float

    @property
    def layers(self) -> int:
        return self.N if self.stack == "encoder" else self.M

    @property
    def sublayers(self) -> int:
        return 2 * self.N if self.stack == "encoder" else 3 * self.M


# Norms


def ln(x: np.ndarray, p: Params, eps: float = 1e-5) -> np.ndarray:
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + eps) * p["scale"] + p["bias"]


def rms(x: np.ndarray, p: Params, eps: float = 1e-5) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * p["scale"]


def scale_norm(x: np.ndarray, p: Params, eps: float = 1e-5) -> np.ndarray:
    length = np.sqrt((x**2).sum(-1, keepdims=True))
    return p.get("scale", math.sqrt(x.shape[-1])) * x / np.where(length.real > eps, length, eps)


def dyt(x: np.ndarray, p: Params, eps: float = 0.0) -> np.ndarray:
    return np.tanh(p["alpha"] * x) * p["scale"] + p["bias"]


def derf(x: np.ndarray, p: Params, eps: float = 0.0) -> np.ndarray:
    return erf(p["alpha"] * x + p["shift"]) * p["scale"] + p["bias"]


def no_norm(x: np.ndarray, p: Params, eps: float = 0.0) -> np.ndarray:
    return x


NORMS = {
    "layer_norm": ln,
    "rms_norm": rms,
    "scale_norm": scale_norm,
    "scale_norm_fixed": scale_norm,
    "dyt": dyt,
    "derf": derf,
    "none": no_norm,
}

# Branches


def linear(x: np.ndarray, p: Params) -> np.ndarray:
    y = x @ p["kernel"]
    return y + p["bias"] if "bias" in p else y


def attention(
    x: np.ndarray,
    memory: np.ndarray,
    p: Params,
    mask: np.ndarray,
    heads: int,
    inner: Any,
    heads_after: bool,
    attention_weights: dict[int, np.ndarray] | None = None,
    first: tuple[list[np.ndarray], np.ndarray] | None = None,
) -> np.ndarray:
    """Softmax attention, head by head. mask [B, T, S] is True where t may attend to s.

    `attention_weights` receives head -> softmax [B, T, S]. `first` has the values of the first layer, which adds them
    itself, and the factors of a value residual.
    """
    q, k, v = linear(x, p["q"]), linear(memory, p["k"]), linear(memory, p["v"])
    if first is not None:
        values, factors = first
        v = factors[0] * values[0] + factors[1] * v if values else v
        values[:] = values or [v]
    size = q.shape[-1] // heads
    outputs = []
    for h in range(heads):
        part = slice(h * size, (h + 1) * size)
        scores = q[..., part] @ np.swapaxes(k[..., part], -1, -2) / math.sqrt(size)
        e = np.where(mask, np.exp(scores - scores.real.max(-1, keepdims=True)), 0)
        if attention_weights is not None:
            attention_weights[h] = e / e.sum(-1, keepdims=True)
        head = e / e.sum(-1, keepdims=True) @ v[..., part]
        if "head_scale" in p and not heads_after:
            head = p["head_scale"][h] * head
        outputs.append(head)
    out = np.concatenate(outputs, -1)
    if inner:
        out = inner(out, p.get("inner_norm", {}))
    out = linear(out, p["o"])
    if "head_scale" in p and heads_after:
        out = np.concatenate([p["head_scale"][h] * out[..., h * size : (h + 1) * size] for h in range(heads)], -1)
    return out


def ffn(x: np.ndarray, p: Params, inner: Any) -> np.ndarray:
    h = linear(x, p["fc1"]) - p.get("shift_in", 0)
    h = np.where(h.real > 0, h, 0)
    if inner:
        h = inner(h, p.get("inner_norm", {}))
    return linear(h - p.get("shift_out", 0), p["fc2"])


# One sub-layer: (x, F, parameters of the layer, position, norm) -> x'


def post_ln(x: np.ndarray, F: Branch, p: Params, at: At, norm: Any) -> np.ndarray:
    return norm(x + F(x), p[f"{at.sub}_post_norm"])


def pre_ln(x: np.ndarray, F: Branch, p: Params, at: At, norm: Any) -> np.ndarray:
    return x + F(norm(x, p[f"{at.sub}_pre_norm"]))


def gpt2norm(x: np.ndarray, F: Branch, p: Params, at: At, norm: Any) -> np.ndarray:
    return x + norm(F(x), p[f"{at.sub}_branch_norm"])


def sandwich(x: np.ndarray, F: Branch, p: Params, at: At, norm: Any) -> np.ndarray:
    return x + norm(F(norm(x, p[f"{at.sub}_pre_norm"])), p[f"{at.sub}_branch_norm"])


def deepnorm_alpha(at: At) -> float:
    return 0.81 * (at.N**4 * at.M) ** 0.0625 if at.stack == "encoder" else (3 * at.M) ** 0.25


def deepnorm(x: np.ndarray, F: Branch, p: Params, at: At, norm: Any) -> np.ndarray:
    return norm(deepnorm_alpha(at) * x + F(x), p[f"{at.sub}_post_norm"])


def branchnorm(x: np.ndarray, F: Branch, p: Params, at: At, norm: Any) -> np.ndarray:
    return norm(x + at.alpha * F(x), p[f"{at.sub}_post_norm"])


def mixnorm(x: np.ndarray, F: Branch, p: Params, at: At, norm: Any) -> np.ndarray:
    return norm(deepnorm_alpha(at) * x + at.alpha * F(x), p[f"{at.sub}_post_norm"])


def mixnorm_anneal(x: np.ndarray, F: Branch, p: Params, at: At, norm: Any) -> np.ndarray:
    a = (1 - at.alpha) * deepnorm_alpha(at) + at.alpha
    return norm(a * x + at.alpha * F(x), p[f"{at.sub}_post_norm"])


def rezero(x: np.ndarray, F: Branch, p: Params, at: At, norm: Any) -> np.ndarray:
    return x + p["branch"] * F(x)


def rezero_ln(x: np.ndarray, F: Branch, p: Params, at: At, norm: Any) -> np.ndarray:
    return norm(x + p["branch"] * F(x), p[f"{at.sub}_post_norm"])


def admin(x: np.ndarray, F: Branch, p: Params, at: At, norm: Any) -> np.ndarray:
    return norm(p[f"{at.sub}_skip"] * x + F(x), p[f"{at.sub}_post_norm"])


def layerscale(x: np.ndarray, F: Branch, p: Params, at: At, norm: Any) -> np.ndarray:
    return x + p[f"{at.sub}_branch"] * F(norm(x, p[f"{at.sub}_pre_norm"]))


def skipinit(x: np.ndarray, F: Branch, p: Params, at: At, norm: Any) -> np.ndarray:
    return x + p[f"{at.sub}_branch"] * F(x)


def unnormalised(x: np.ndarray, F: Branch, p: Params, at: At, norm: Any) -> np.ndarray:
    return x + F(x)


def fixup(x: np.ndarray, F: Branch, p: Params, at: At, norm: Any) -> np.ndarray:
    return x + p[f"{at.sub}_branch"] * F(x - p[f"{at.sub}_shift"])


def normformer(x: np.ndarray, F: Branch, p: Params, at: At, norm: Any) -> np.ndarray:
    h = F(norm(x, p[f"{at.sub}_pre_norm"]))
    return x + (norm(h, p["self_branch_norm"]) if at.sub == "self" else h)


def normformer_residual(x: np.ndarray, F: Branch, p: Params, at: At, norm: Any) -> np.ndarray:
    skip = p["ffn_skip"] * x if at.sub == "ffn" else x
    return skip + normformer(x, F, p, at, norm) - x


def lns(x: np.ndarray, F: Branch, p: Params, at: At, norm: Any) -> np.ndarray:
    return x + F(norm(x, p[f"{at.sub}_pre_norm"]) / math.sqrt(at.l))


def prores_pre_ln(x: np.ndarray, F: Branch, p: Params, at: At, norm: Any) -> np.ndarray:
    return x + at.alpha * F(norm(x, p[f"{at.sub}_pre_norm"]))


def prores_sandwich(x: np.ndarray, F: Branch, p: Params, at: At, norm: Any) -> np.ndarray:
    return x + at.alpha * norm(F(norm(x, p[f"{at.sub}_pre_norm"])), p[f"{at.sub}_branch_norm"])


def prores_lns(x: np.ndarray, F: Branch, p: Params, at: At, norm: Any) -> np.ndarray:
    return x + at.alpha * F(norm(x, p[f"{at.sub}_pre_norm"]) / math.sqrt(at.l))


def mix_ln(x: np.ndarray, F: Branch, p: Params, at: At, norm: Any) -> np.ndarray:
    if at.l <= at.layers // 4:
        return norm(x + F(x), p[f"{at.sub}_norm"])
    return x + F(norm(x, p[f"{at.sub}_norm"]))


def keel(x: np.ndarray, F: Branch, p: Params, at: At, norm: Any) -> np.ndarray:
    h = F(norm(x, p[f"{at.sub}_pre_norm"]))
    if at.l > 1:
        return norm(at.sublayers * x + h, p[f"{at.sub}_post_norm"])
    return x + h if at.sub == "self" else norm(x + h, p[f"{at.sub}_post_norm"])


def gpas(x: np.ndarray, F: Branch, p: Params, at: At, norm: Any) -> np.ndarray:
    y, g = pre_ln(x, F, p, at, norm), p[f"{at.sub}_gate"]
    return y - g / (1 + np.exp(-g)) * y.real  # a constant in the complex step: stop_gradient


def deeploop(x: np.ndarray, F: Branch, p: Params, at: At, norm: Any) -> np.ndarray:
    return norm(math.sqrt(at.sublayers) * x + F(x), p[f"{at.sub}_post_norm"])


def completep(x: np.ndarray, F: Branch, p: Params, at: At, norm: Any) -> np.ndarray:
    return x + F(norm(x, p[f"{at.sub}_pre_norm"])) / (at.layers / 2)


def depth_mup(x: np.ndarray, F: Branch, p: Params, at: At, norm: Any) -> np.ndarray:
    return x + F(norm(x, p[f"{at.sub}_pre_norm"])) / math.sqrt(at.layers / 2)


SUBLAYER: dict[str, Callable[..., np.ndarray]] = {
    "post_ln": post_ln,
    "pre_ln": pre_ln,
    "gpt2norm": gpt2norm,
    "sandwich": sandwich,
    "peri_ln": sandwich,
    "deepnorm": deepnorm,
    "deepnorm_torchscale": deepnorm,
    "branchnorm": branchnorm,
    "mixnorm": mixnorm,
    "mixnorm_anneal": mixnorm_anneal,
    "rezero": rezero,
    "rezero_one": rezero,
    "rezero_ln": rezero_ln,
    "admin": admin,
    "admin_log": admin,
    "admin_constant": admin,
    "admin_linear": admin,
    "layerscale": layerscale,
    "skipinit": skipinit,
    "ds_init": post_ln,
    "ds_init_code": post_ln,
    "t_fixup": unnormalised,
    "fixup": fixup,
    "fixup_code": fixup,
    "small_init": pre_ln,
    "pre_scale_norm": pre_ln,
    "sub_ln": pre_ln,
    "normformer": normformer,
    "normformer_residual": normformer_residual,
    "normformer_fairseq": normformer,
    "dlcl": pre_ln,
    "dlcl_post": post_ln,
    "residual_dual": post_ln,
    "b2t": post_ln,
    "lns": lns,
    "mix_ln": mix_ln,
    "keel": keel,
    "gpas": gpas,
    "completep": completep,
    "depth_mup": depth_mup,
    "deepnorm_deeploop": deeploop,
    "prores_post_ln": branchnorm,
    "prores_pre_ln": prores_pre_ln,
    "prores_deepnorm": mixnorm,
    "prores_sandwich": prores_sandwich,
    "prores_lns": prores_lns,
}

NO_FINAL_NORM = {"post_ln", "deepnorm", "deepnorm_torchscale", "branchnorm", "mixnorm", "mixnorm_anneal", "rezero"}
NO_FINAL_NORM |= {"rezero_one", "rezero_ln", "admin", "admin_log", "admin_constant", "admin_linear", "skipinit"}
NO_FINAL_NORM |= {"deepnorm_deeploop", "ds_init", "ds_init_code", "t_fixup", "b2t", "keel", "dlcl_post"}
NO_FINAL_NORM |= {"prores_post_ln", "prores_deepnorm"}

# Stacks


def stack(
    method: str,
    name: str,
    x: np.ndarray,
    params: Params,
    branches: Callable[[Params], dict[str, Branch]],
    *,
    N: int,
    M: int,
    alpha: float,
    kind: str = "layer_norm",
) -> np.ndarray:
    """Runs the embeddings through all layers of one stack and the norm at its end."""
    norm = NORMS[kind]
    layers = N if name == "encoder" else M

    def select_layer(tree: Any, index: int) -> Any:
        return {k: select_layer(v, index) for k, v in tree.items()} if isinstance(tree, dict) else tree[index]

    if method == "peri_ln":
        x = norm(x, params[f"{name}_embedding_norm"])
    if method in STREAMS:

        def sublayers() -> Any:
            for index in range(layers):
                p = collections.defaultdict(dict, select_layer(params[name], index))
                yield from ((index + 1, sub, F, p) for sub, F in branches(p).items())

        count = At(name, "", 1, N, M, alpha).sublayers
        x = STREAMS[method](x, sublayers(), norm, params.get(f"{name}_streams", {}), layers, count)
        return norm(x, params[f"{name}_norm"])
    history, total = [x], x
    combination = params.get(f"{name}_combination")
    for index in range(layers):
        p = collections.defaultdict(dict, select_layer(params[name], index))  # some norms have no parameters
        if combination is not None:
            x = sum(combination["weight"][index, k] * u for k, u in enumerate(history))
            if method == "dlcl_post" and index > 0:
                x = norm(x, select_layer(combination["norm"], index - 1))
        layer_input = x
        for sub, F in branches(p).items():
            at = At(name, sub, index + 1, N, M, alpha)
            if method == "residual_dual":
                total = total + F(x)
            if method == "b2t" and sub == "ffn":
                x = norm(x + layer_input + F(x), p["ffn_post_norm"])
            else:
                x = SUBLAYER[method](x, F, p, at, norm)
        history.append(norm(x, select_layer(combination["norm"], index)) if method == "dlcl" and combination else x)
    if combination is not None:
        x = sum(combination["weight"][layers, k] * u for k, u in enumerate(history))
        if method == "dlcl_post":
            return norm(x, select_layer(combination["norm"], layers - 1))
    if method in NO_FINAL_NORM:
        return x
    end = params[f"{name}_norm"]
    if method.startswith("fixup"):
        return end.get("scale", 1.0) * (x - end["shift"])
    if method == "residual_dual":
        return x + norm(total, end, 1e-7)
    return norm(x, end)


def forward(
    method: str,
    params: Params,
    source_x: np.ndarray,
    target_x: np.ndarray,
    source_mask: np.ndarray,
    *,
    heads: int,
    alpha: float,
    kind: str = "layer_norm",
    attention_weights: list[dict[int, np.ndarray]] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the outputs of encoder and decoder for embedded source [B, S, D] and target [B, T, D].

    source_mask [B, S] is True at tokens. `attention_weights` receives head -> cross-attention weights [B, T, S] of each
    decoder layer.
    """
    norm = NORMS[kind]
    N, M = (len(params[name]["ffn"]["fc1"]["kernel"]) for name in ("encoder", "decoder"))
    heads_after = method == "normformer_fairseq"
    inner_self = norm if method == "sub_ln" else None
    inner_ffn = norm if method == "sub_ln" or method.startswith("normformer") else None
    source_key_mask = source_mask[:, None, :]
    causal = np.tri(target_x.shape[1], dtype=bool)[None]

    kept: dict[str, list[np.ndarray]] = {"encoder": [], "decoder": []}

    def own(name: str, p: Params, mask: np.ndarray) -> Branch:
        first = (kept[name], p["value_shares"]) if "value_shares" in p else None
        return lambda z: attention(z, z, p["self"], mask, heads, inner_self, heads_after, first=first)

    def encoder_branches(p: Params) -> dict[str, Branch]:
        return {
            "self": own("encoder", p, source_key_mask),
            "ffn": lambda z: ffn(z, p["ffn"], inner_ffn),
        }

    common: dict[str, Any] = dict(N=N, M=M, alpha=alpha, kind=kind)
    memory = stack(method, "encoder", source_x, params, encoder_branches, **common)

    def decoder_branches(p: Params) -> dict[str, Branch]:
        layer_weights: dict[int, np.ndarray] = {}
        if attention_weights is not None:
            attention_weights.append(layer_weights)
        return {
            "self": own("decoder", p, causal),
            "cross": lambda z: attention(
                z, memory, p["cross"], source_key_mask, heads, None, heads_after, layer_weights
            ),
            "ffn": lambda z: ffn(z, p["ffn"], inner_ffn),
        }

    return memory, stack(method, "decoder", target_x, params, decoder_branches, **common)
