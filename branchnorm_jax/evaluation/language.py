"""Language accuracy: how often a multilingual model translates to the requested language."""

import importlib.metadata
from collections.abc import Iterable, Sequence

from branchnorm_jax.codes import base
from branchnorm_jax.evaluation.bleu import Measure, Score


def right_language(target_lang: str, languages: Iterable[str]) -> Measure:
    """Returns a measure of the translations in the requested language, in percent.

    An empty translation counts as wrong. The measure returns no score if the language identifier (py3langid) does not
    know the requested language.

    Args:
      target_lang: the requested language.
      languages: the other languages of the model. The identifier chooses among all languages of the model that it
        knows. The signature lists them.
    """
    import py3langid

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
