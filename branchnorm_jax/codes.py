"""Language codes."""

import functools
import re

from babel.core import get_global


@functools.cache
def base(code: str) -> str:
    """Returns the language of a code in ISO 639-1, which libraries know, or as it stands if it has no such code.

    >>> [base(code) for code in ("de_DE", "deu_Latn", "zh-Hant", "EN", "yue_Hant")]
    ['de', 'de', 'zh', 'en', 'yue']
    """
    language = re.split("[-_]", code)[0].lower()
    return get_global("language_aliases").get(language, language)
