"""Training losses, as sums that add up across batches and hosts."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class LossSums(NamedTuple):
    """Sums over real target tokens, float32 []: divide by `tokens` for means in nats."""

    loss: jax.Array
    nll: jax.Array
    tokens: jax.Array


def smoothed_cross_entropy(
    logits_BTV: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    smoothing: float,
    unused: Sequence[int] = (),
) -> LossSums:
    """Label-smoothed cross-entropy in fairseq's form (since 2021).

    loss = (1 - eps - eps_i) nll + eps_i sum_v(-log p_v) with eps_i = eps / (V - 1): the cross-entropy against
    q(target) = 1 - eps, q(any other word) = eps / (V - 1).

    Args:
      logits_BTV: unnormalised scores; computed with in float32.
      targets_BT: int [B, T], the words to predict.
      weights_BT: float [B, T], 1 at real tokens and 0 at padding.
      smoothing: eps.
      unused: words that the smoothing leaves out: V counts the others.
    """
    logits_BTV = logits_BTV.astype(jnp.promote_types(logits_BTV.dtype, jnp.float32))
    vocabulary = logits_BTV.shape[-1] - len(unused)
    log_normaliser_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    target_logits_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
    nll_BT = log_normaliser_BT - target_logits_BT
    sums_BT = logits_BTV.sum(-1) if not unused else logits_BTV.at[..., np.array(unused)].set(0).sum(-1)
    all_words_BT = vocabulary * log_normaliser_BT - sums_BT
    share = smoothing / (vocabulary - 1)
    loss_BT = (1 - smoothing - share) * nll_BT + share * all_words_BT
    weights_BT = weights_BT.astype(logits_BTV.dtype)
    return LossSums((loss_BT * weights_BT).sum(), (nll_BT * weights_BT).sum(), weights_BT.sum())
