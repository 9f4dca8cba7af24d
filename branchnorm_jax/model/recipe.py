"""The residual algebra: the choices that a method makes about a sub-layer, as one dataclass.

    z  = c Q(x)                       Q: norm or identity, c: constant per layer
    h  = Dropout(G(F(z)))             F: attention or feed-forward with its inner hooks, G: norm or identity
    x' = P(a x + b h)                 a, b: constant, scheduled or learned; P: norm or identity

z and x may also come from several residual streams; see `streams.py`.

`blocks.py` implements this update without knowing any method by name. `methods.py` is the table of methods.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

EVERYWHERE = frozenset({"self", "cross", "ffn"})
NOWHERE: frozenset[str] = frozenset()


class Depth(NamedTuple):
    """Layers of the encoder (N in the papers; 0 in a decoder-only model) and of the decoder (M)."""

    encoder: int
    decoder: int

    @property
    def sublayers(self) -> "Depth":
        """n, the number of residual sub-layers of each stack: 2N and 3M, or 2M without an encoder.

        >>> Depth(6, 6).sublayers, Depth(0, 6).sublayers
        (Depth(encoder=12, decoder=18), Depth(encoder=0, decoder=12))
        """
        return Depth(2 * self.encoder, (3 if self.encoder else 2) * self.decoder)


STACKS = Depth._fields
"""The names of the stacks: encoder, decoder. A decoder-only model has only the latter."""

PerLayer = float | tuple[float, ...]
"""One number for all layers of a stack, or one number per layer."""


class PerStack(NamedTuple):
    """Numbers for the layers of the encoder and of the decoder."""

    encoder: PerLayer
    decoder: PerLayer


Rule = Callable[[Depth], PerStack]
"""A function from the depth of a model to the numbers of its layers."""


def always(value: float) -> Rule:
    """Returns a rule that gives the same number at any depth."""

    def rule(depth: Depth) -> PerStack:
        return PerStack(value, value)

    return rule


def scaled(rule: Rule, factor: float) -> Rule:
    """Returns `rule` multiplied by a factor."""

    def times(value: PerLayer) -> PerLayer:
        return tuple(factor * layer for layer in value) if isinstance(value, tuple) else factor * value

    return lambda depth: PerStack(*map(times, rule(depth)))


ZERO, ONE = always(0.0), always(1.0)


@dataclasses.dataclass(frozen=True)
class Weight:
    """One factor of the algebra: `a` of the skip connection or `b` of the branch.

    Attributes:
      start: the value; if the factor is learned, the initial value.
      end: if given, the factor is start + (end - start) alpha_t. Training passes alpha_t to the model.
      learned: "" constant; "layer" one scalar per layer; "sublayer" one scalar per sub-layer; "vector" one [D] per
        sub-layer.
      on: the sub-layers with this factor; in the other sub-layers it is 1.
    """

    start: Rule = ONE
    end: Rule | None = None
    learned: str = ""
    on: frozenset[str] = EVERYWHERE


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One method.

    Attributes:
      equation: the sub-layer update as text, for the table of methods.
      citation: title, authors and year of the paper.
      arxiv: the paper's number on arXiv, empty if it has none.
      note: notes for users: interpretations of the paper, and differences from official code.
      pre: Q is a norm.
      pre_scale: the factor c; None means 1.
      branch_norm: sub-layers where G is a norm.
      post: P is a norm.
      post_first: if given, 0 marks layers whose first sub-layer has no P.
      post_layers: if given, overrides `pre` and `post` by layer: 1 marks a Post-norm layer, 0 a Pre-norm layer.
      final: what follows the last layer of each stack: "" nothing, "norm" a norm, or "shift" Fixup's learned scalar
        (in the encoder also a learned scale).
      final_epsilon: epsilon of the final norm.
      embedding_norm: a norm follows the embeddings of each stack.
      skip: the factor a.
      branch: the factor b.
      depth_power: p > 0 makes b = m^-p in a stack of m model.base_layers layers. Training then multiplies the learning
        rate of the layers by m^(p - 1), and Adam's epsilon by m^-p.
      damped: each sub-layer ends with x' - silu(g) stop_gradient(x'), g a learned scalar from 0.
      inner_norm: sub-layers with a norm before their last matrix (o or fc2).
      head_scale: attention sub-layers with a learned factor per head, applied before o.
      head_scale_last: the factors are applied after o instead, each to its head's share of the features.
      shifts: learned scalars are subtracted before each sub-layer and on both sides of the activation.
      biases: the matrices have biases.
      stream: what a layer passes to the next one. "plain": x. "bottom_to_top": x; the last sub-layer of a layer also
        adds the layer's input. "dual": x and the sum of all branches; the norm of the sum is added at the end.
        "combination": a learned combination of the normalised outputs of all earlier layers ("combination_post": the
        combination is normalised instead). "siamese", "hyper", "blocks": see `streams.py`.
      warmup_layers: if > 0, the largest number of layers for which T is by default the warm-up of the learning rate, if
        updates are scaled; see `config.usual_alpha_steps`.
      profiled: a profiling pass sets the learned skip weights before the first update (`admin.py`).
      init: base distribution of the weights, a key of `initializers.BASES`.
      gain: factors on the initial weights, by matrix ("v"), by sub-layer and matrix ("cross/v", which takes
        precedence), or by embedding table ("embedding/source").
      recommended: the options that the authors train with, "section.name" -> value. For `branchnorm` they are this
        project's.
    """

    equation: str
    citation: str
    arxiv: str = ""
    note: str = ""
    pre: bool = False
    pre_scale: Rule | None = None
    branch_norm: frozenset[str] = NOWHERE
    post: bool = False
    post_first: Rule | None = None
    post_layers: Rule | None = None
    final: str = ""
    final_epsilon: float = 1e-5
    embedding_norm: bool = False
    skip: Weight = Weight()
    branch: Weight = Weight()
    depth_power: float = 0.0
    damped: bool = False
    inner_norm: frozenset[str] = NOWHERE
    head_scale: frozenset[str] = NOWHERE
    head_scale_last: bool = False
    shifts: bool = False
    biases: bool = True
    stream: str = "plain"
    warmup_layers: int = 0
    profiled: bool = False
    init: str = "xavier_uniform"
    gain: Mapping[str, Rule] = dataclasses.field(default_factory=dict, hash=False)
    recommended: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def grows(self) -> bool:
        """Whether the branch weight b grows with alpha."""
        return self.branch.end is not None

    def gain_of(self, sublayer: str, matrix: str) -> Rule | None:
        """Returns the factor on the initial values of a sub-layer's matrix and its bias; None means 1."""
        return self.gain.get(f"{sublayer}/{matrix}", self.gain.get("fc1" if matrix == "gate" else matrix))

    @property
    def combines(self) -> bool:
        """Whether layers read learned combinations of all earlier layers' outputs."""
        return self.stream in ("combination", "combination_post")
