"""Language codes."""

import difflib
import functools
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from babel.core import Locale, get_global
from babel.localedata import exists as locale_exists


@functools.cache
def base(code: str) -> str:
    """Returns the language of a code in ISO 639-1, which libraries know, or as it stands if it has no such code.

    >>> [base(code) for code in ("de_DE", "deu_Latn", "zh-Hant", "EN", "yue_Hant")]
    ['de', 'de', 'zh', 'en', 'yue']
    """
    language = re.split("[-_]", code)[0].lower()
    return get_global("language_aliases").get(language, language)


def near(code: str, known: Sequence[str]) -> list[str]:
    """Returns the known codes that a user may mean by another one: those of the same language, or similar ones.

    >>> near("de", ["deu_Latn", "eng_Latn"]), near("eng_latin", ["deu_Latn", "eng_Latn"]), near("fr", ["de", "en"])
    (['deu_Latn'], ['eng_Latn'], [])
    """
    return [other for other in known if base(other) == base(code)] or difflib.get_close_matches(code, known)


def names(codes: Iterable[str]) -> dict[str, str]:
    """Returns the English name of each code. All names are different.

    Names come from the Unicode CLDR; a language that it does not know keeps its code. If several codes are of the same
    language, script and region follow in brackets, or the code if these are the same, too.

    >>> print(*names(["deu_Latn", "zho_Hans", "zho_Hant", "aka_Latn", "twi_Latn", "pbt_Arab"]).values(), sep=", ")
    German, Chinese (Simplified), Chinese (Traditional), Akan (aka_Latn), Akan (twi_Latn), pbt_Arab
    """
    forms = {code: _forms(code) for code in codes}
    uses = Counter(form for each in forms.values() for form in set(each))
    return {code: next(form for form in each if uses[form] == 1) for code, each in forms.items()}


def named(text: str, codes: Iterable[str]) -> str:
    """Returns the only code whose language a text names, or else the text.

    The name is in English or in the language itself, or another code of the language: with its script or region, if the
    code has none, or without them.

    >>> texts = ("English", "Deutsch", "deu", "eng_Latn", "zho_Hant", "Portuguese", "id", "eng_words")
    >>> print(*(named(text, ["en", "de", "zh_Hans", "pt", "pt_BR"]) for text in texts))
    en de de en zho_Hant Portuguese id eng_words
    """
    meant = [code for code in codes if _is_code_of(text, code) or text.lower() in _called(code)]
    return meant[0] if len(meant) == 1 else text


def _is_code_of(text: str, code: str) -> bool:
    """Returns whether a text is a code of the language of `code`, and not of another script or region."""
    english, (language, *parts) = Locale("en"), re.split("[-_]", text.lower())
    known = all(part.title() in english.scripts or part.upper() in english.territories for part in parts)
    own = re.split("[-_]", code.lower())[1:]
    return len(language) in (2, 3) and known and base(language) == base(code) and (not parts or not own or parts == own)


def _called(code: str) -> set[str]:
    """Returns the English name of a language and its own, in lower case, as far as the Unicode CLDR knows them."""
    languages = {base(code), re.split("[-_]", code)[0].lower()}
    known = [Locale(language) for language in ("en", *languages) if len(language) < 4 and locale_exists(language)]
    return {locale.languages[each].lower() for locale in known for each in languages if each in locale.languages}


def _forms(code: str) -> tuple[str, str, str]:
    """Returns the language, the language with script and region in brackets, and the language with its code."""
    english = Locale("en")
    own, *parts = re.split("[-_]", code)
    language = english.languages.get(own.lower()) or english.languages.get(base(code)) or code
    rest = ", ".join(english.scripts.get(part.title()) or english.territories.get(part.upper(), part) for part in parts)
    return language, f"{language} ({rest})" if rest else language, f"{language} ({code})"
