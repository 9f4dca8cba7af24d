"""Whether one system is better than another, or only looks so on this test set."""

from collections.abc import Sequence
from typing import NamedTuple

from sacrebleu.significance import PairedTest, Result

from branchnorm_jax.evaluation.bleu import sacrebleu_metric

SAMPLES = 1000


class Comparison(NamedTuple):
    """BLEU of both systems, and the probability of such a difference if they were equally good."""

    baseline: float
    system: float
    p_value: float


def paired_bootstrap(
    baseline: Sequence[str], system: Sequence[str], references: Sequence[str], target_lang: str
) -> Comparison:
    """Paired bootstrap resampling of sacreBLEU (Koehn, 2004), 1000 samples, sacreBLEU's own seed.

    Args:
      baseline: translations, one per line.
      system: the other system's, of the same lines.
      references: the references of those lines.
      target_lang: chooses the tokeniser.
    """
    systems: list[tuple[str, Sequence[str]]] = [("baseline", baseline), ("system", system)]
    metrics = {"BLEU": sacrebleu_metric(target_lang)}
    _, found = PairedTest(systems, metrics, [list(references)], test_type="bs", n_samples=SAMPLES)()
    first, second = found["BLEU"]
    assert isinstance(first, Result) and isinstance(second, Result) and second.p_value is not None
    # Any sample shows a difference of at least 0; sacreBLEU counts those that show more than the one observed.
    p_value = 1.0 if first.score == second.score else second.p_value
    return Comparison(first.score, second.score, p_value)
