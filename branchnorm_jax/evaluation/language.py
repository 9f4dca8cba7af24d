"""Did a model of several languages answer in the one that it was asked for?"""

import importlib.metadata
import re
from collections.abc import Iterable, Sequence

from branchnorm_jax.evaluation.bleu import Score


def right_language(hypotheses: Sequence[str], target_lang: str, languages: Iterable[str]) -> list[Score]:
    """The share of translations in the language asked for, in percent; none if the identifier does not know them all.

    Args:
      hypotheses: one translation per line; an empty one is in no language.
      target_lang: the language asked for.
      languages: those that the model might have taken instead; the identifier chooses among these alone.
    """
    import py3langid

    def base(lang: str) -> str:
        return re.split("[-_]", lang)[0].lower()

    among = sorted({base(lang) for lang in (*languages, target_lang)})
    try:
        py3langid.set_languages(among)
    except ValueError:
        return []
    right = sum(bool(line.strip()) and py3langid.classify(line)[0] == base(target_lang) for line in hypotheses)
    signature = f"py3langid-{importlib.metadata.version('py3langid')}|among:{','.join(among)}"
    return [Score("right_language", 100 * right / len(hypotheses), signature)]
