"""The residual algebra: the choices that a method makes about a sub-layer, as one dataclass.

    z  = c Q(x)                       Q: norm or identity, c: constant per layer
    h  = Dropout(G(F(z)))             F: attention or feed-forward with its inner hooks, G: norm or identity
    x' = P(a x + b h)                 a, b: constant, scheduled or learned; P: norm or identity

`blocks.py` computes it and knows no method by name; `methods.py` is the table of the methods.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

EVERYWHERE = frozenset({"self", "cross", "ffn"})
NOWHERE: frozenset[str] = frozenset()


class Depth(NamedTuple):
    """Layers of the encoder (N in the papers) and of the decoder (M)."""

    encoder: int
    decoder: int


STACKS = Depth._fields
"""The names of the stacks: encoder, decoder."""

PerLayer = float | tuple[float, ...]
"""One number for all layers of a stack, or one for each."""


class PerStack(NamedTuple):
    """Numbers for the encoder's layers and for the decoder's."""

    encoder: PerLayer
    decoder: PerLayer


Rule = Callable[[Depth], PerStack]
"""How a number depends on depth."""


def always(value: float) -> Rule:
    """The same number at any depth."""

    def rule(depth: Depth) -> PerStack:
        return PerStack(value, value)

    return rule


def scaled(rule: Rule, factor: float) -> Rule:
    """`rule` times a factor."""

    def times(value: PerLayer) -> PerLayer:
        return tuple(factor * layer for layer in value) if isinstance(value, tuple) else factor * value

    return lambda depth: PerStack(*map(times, rule(depth)))


ZERO, ONE = always(0.0), always(1.0)


@dataclasses.dataclass(frozen=True)
class Weight:
    """One factor of the algebra: `a` of the skip connection or `b` of the branch.

    Attributes:
      start: its value; where training learns it, its initial value.
      end: if given, the factor is start + (end - start) alpha_t; alpha_t is the branch scale that training passes in.
      learned: "" constant; "layer" one scalar per layer; "sublayer" one scalar per sub-layer; "vector" one [D] per
        sub-layer.
      on: the sub-layers that have it; in the others it is 1.
    """

    start: Rule = ONE
    end: Rule | None = None
    learned: str = ""
    on: frozenset[str] = EVERYWHERE


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One method.

    Attributes:
      equation: the sub-layer update, for people.
      citation: where it comes from.
      arxiv: the paper's number on arXiv, empty if it has none.
      note: what a reader must know beyond the equation: interpretations, differences from official code.
      pre: Q is a norm.
      pre_scale: c; None: 1.
      branch_norm: sub-layers where G is a norm.
      post: P is a norm.
      post_first: if given, 0 marks layers whose first sub-layer has no P.
      post_layers: if given, overrides `pre` and `post` by layer: 1 marks a Post-norm layer, 0 a Pre-norm layer.
      final: what follows the last layer of each stack: "" nothing, "norm", or Fixup's scalar "shift" (the encoder's
        with a scale).
      final_epsilon: of the final norm.
      embedding_norm: a norm follows the embeddings of each stack.
      skip: a.
      branch: b.
      inner_norm: sub-layers with a norm before their last matrix (o or fc2).
      head_scale: sub-layers whose attention heads have a learned factor each, before o.
      head_scale_last: that factor multiplies the output of o instead, in groups of its features.
      shifts: learned scalars are subtracted before each sub-layer and on both sides of the activation.
      biases: the matrices have biases.
      stream: what runs through the stack: "plain" x; "bottom_to_top" x, and the last sub-layer of a layer adds the
        layer's input; "dual" x and the sum of all branches, whose norm is added at the end; "combination" learned
        combinations of all earlier layers' outputs, normalised first ("combination_post": normalised after).
      profiled: before the first update the learned skip weights are set by a profiling pass (`admin.py`).
      init: base distribution of the weights, a key of `initializers.BASES`.
      gain: factors on it, by matrix ("v"), sub-layer and matrix ("cross/v", which wins), or table
        ("embedding/source").
      recommended: options that its authors train with, "section.name" -> value.
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
    inner_norm: frozenset[str] = NOWHERE
    head_scale: frozenset[str] = NOWHERE
    head_scale_last: bool = False
    shifts: bool = False
    biases: bool = True
    stream: str = "plain"
    profiled: bool = False
    init: str = "xavier_uniform"
    gain: Mapping[str, Rule] = dataclasses.field(default_factory=dict, hash=False)
    recommended: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def grows(self) -> bool:
        """Whether the branch weight b grows with alpha."""
        return self.branch.end is not None

    def gain_of(self, sublayer: str, matrix: str) -> Rule | None:
        """The factor on the initial values of a sub-layer's matrix and its bias; None: 1."""
        return self.gain.get(f"{sublayer}/{matrix}", self.gain.get("fc1" if matrix == "gate" else matrix))

    @property
    def combines(self) -> bool:
        """Whether layers read learned combinations of all earlier layers' outputs."""
        return self.stream in ("combination", "combination_post")
