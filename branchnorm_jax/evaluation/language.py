"""Did a model of several languages answer in the one that it was asked for?"""

import importlib.metadata
import re
from collections.abc import Iterable, Sequence

from branchnorm_jax.evaluation.bleu import Measure, Score


def right_language(target_lang: str, languages: Iterable[str]) -> Measure:
    """The share of translations in the language asked for, in percent; none if the identifier does not know that one.

    An empty translation is in no language.

    Args:
      target_lang: the language asked for.
      languages: those that the model might have taken instead; the identifier chooses among those of them that it
        knows, which the signature names.
    """
    import py3langid

    def base(lang: str) -> str:
        return re.split("[-_]", lang)[0].lower()

    py3langid.set_languages(None)
    known = {lang for lang, _ in py3langid.rank("")}
    among = sorted(known & {base(lang) for lang in (*languages, target_lang)})
    signature = f"py3langid-{importlib.metadata.version('py3langid')}|among:{','.join(among)}"

    def measure(sources: Sequence[str], hypotheses: Sequence[str], references: Sequence[str]) -> list[Score]:
        if base(target_lang) not in among:
            return []
        py3langid.set_languages(among)
        right = sum(bool(line.strip()) and py3langid.classify(line)[0] == base(target_lang) for line in hypotheses)
        return [Score("right_language", 100 * right / len(hypotheses), signature)]

    return measure
