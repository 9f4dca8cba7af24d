"""The built-in corpus: held-out values, ambiguous sentences, and correct grammar."""

import datetime
import re
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchnorm_jax.data import numerals
from branchnorm_jax.data.numerals import Item
from branchnorm_jax.errors import UserError

COUNTS = {"train": 10_000, "valid": 2_000, "test": 2_000}
CARRIERS = {"cardinal": 6, "ordinal": 5, "year": 5, "quantity": 6, "money": 7, "date": 6, "time": 5, "sum": 3}
EXAMPLES = {
    "cardinal": (4312,),
    "ordinal": (412,),
    "year": (1984,),
    "quantity": (4312,),
    "money": (4312, 50),
    "date": (datetime.date(1997, 3, 4).toordinal(),),
    "time": (16 * 60 + 5,),
    "sum": (412, 555, 967),
}


@pytest.fixture(scope="module")
def items() -> dict[str, list[Item]]:
    return {split: list(numerals.items(split, count)) for split, count in COUNTS.items()}


@pytest.fixture(scope="module")
def texts(items: dict[str, list[Item]]) -> dict[str, dict[str, list[str]]]:
    """Language -> split -> the sentences of `items`."""
    return {
        lang: {split: [numerals.render(item, lang) for item in items[split]] for split in items}
        for lang in numerals.LANGUAGES
    }


def held_out_keys(item: Item) -> Iterator[tuple[str, int]]:
    """Independent implementation of the documented held-out values: days, minutes, and numbers of any kind."""
    if item.kind in ("date", "time"):
        yield item.kind, item.value[0]
    else:
        for number in item.value if item.kind == "sum" else item.value[:1]:
            yield "number", number


def test_order_depends_on_split_and_seed_only() -> None:
    thousand = list(numerals.items("train", 1000, seed=3))
    assert thousand == list(numerals.items("train", 1000, seed=3))
    assert thousand[:77] == list(numerals.items("train", 77, seed=3))
    assert thousand != list(numerals.items("train", 1000, seed=4))


def test_order_is_the_same_on_every_machine() -> None:
    """Pins the generated items, because a change would change the data of every earlier run."""
    assert [(item.kind, item.carrier, *item.value) for item in numerals.items("train", 10)] == [
        ("cardinal", 2, 4717),
        ("ordinal", 0, 651),
        ("year", 0, 1837),
        ("quantity", 0, 9917),
        ("money", 0, 5834, 35),
        ("date", 5, 694014),
        ("time", 1, 1037),
        ("sum", 0, 954, 722, 1676),
        ("cardinal", 4, 3805),
        ("ordinal", 2, 153),
    ]


def test_items_are_unique(items: dict[str, list[Item]]) -> None:
    for split, drawn in items.items():
        assert len(drawn) == len(set(drawn)) == COUNTS[split]


def test_test_split_can_be_drawn_up_to_its_capacity() -> None:
    most = numerals.capacity("test")
    drawn = list(numerals.items("test", most))
    assert len(set(drawn)) == most
    assert {(item.kind, item.carrier) for item in drawn} == {(k, c) for k, n in CARRIERS.items() for c in range(n)}
    assert {key for item in drawn for key in held_out_keys(item)}.isdisjoint(
        key for item in numerals.items("valid", numerals.capacity("valid")) for key in held_out_keys(item)
    )
    with pytest.raises(UserError, match=rf"test.*{most}"):
        numerals.items("test", most + 1)


def test_kinds_alternate() -> None:
    assert [item.kind for item in numerals.items("valid", 16, seed=5)] == list(CARRIERS) * 2


def test_train_contains_no_held_out_values(items: dict[str, list[Item]]) -> None:
    keys = {split: {key for item in drawn for key in held_out_keys(item)} for split, drawn in items.items()}
    assert keys["train"].isdisjoint(keys["test"] | keys["valid"])
    assert keys["test"].isdisjoint(keys["valid"])
    assert all(number >= 100 for split in ("valid", "test") for axis, number in keys[split] if axis == "number")


def test_split_depends_only_on_the_value(items: dict[str, list[Item]]) -> None:
    axes = {"date": "day", "time": "minute", "number": "number"}
    for split, drawn in items.items():
        assert {numerals.split_of(axes[a], v) for item in drawn for a, v in held_out_keys(item)} == {split}


def test_valid_and_test_each_hold_out_about_5_percent() -> None:
    splits = [numerals.split_of("number", number) for number in range(100, 10_000)]
    for split in ("valid", "test"):
        assert 0.04 < splits.count(split) / len(splits) < 0.06


@pytest.mark.parametrize("lang", numerals.LANGUAGES)
def test_sentences_are_unambiguous(
    lang: str, items: dict[str, list[Item]], texts: dict[str, dict[str, list[str]]]
) -> None:
    """Each source sentence has a single translation, and no held-out source sentence occurs in train."""
    meaning: dict[str, Item] = {}
    for split, drawn in items.items():
        for item, text in zip(drawn, texts[lang][split], strict=True):
            assert meaning.setdefault(text, item) == item


@pytest.mark.parametrize("lang", numerals.LANGUAGES)
@pytest.mark.parametrize(("kind", "numbers"), [("cardinal", range(10_000)), ("ordinal", range(1, 1_000))])
def test_every_number_has_its_own_rendering(lang: str, kind: str, numbers: range) -> None:
    assert len({numerals.render(Item(kind, 0, (number,)), lang) for number in numbers}) == len(numbers)


@pytest.mark.parametrize(("source", "target"), [("en", "de"), ("de", "en"), ("fr", "vi"), ("pl", "es"), ("cs", "it")])
def test_pairs_render_the_same_items(source: str, target: str, items: dict[str, list[Item]]) -> None:
    pairs = list(numerals.pairs("test", source, target, COUNTS["test"]))
    assert pairs == [(numerals.render(item, source), numerals.render(item, target)) for item in items["test"]]
    assert len(dict(pairs)) == len(pairs)


@pytest.mark.parametrize("lang", numerals.LANGUAGES)
def test_sentences_contain_only_plain_spaces(lang: str, texts: dict[str, dict[str, list[str]]]) -> None:
    for text in texts[lang]["train"]:
        assert text.isprintable()  # false for U+00A0, U+202F and every other space except U+0020
        assert "  " not in text
        assert text == text.strip()
        assert "{" not in text


@pytest.mark.parametrize("lang", [lang for lang in numerals.LANGUAGES if lang != "en"])
@pytest.mark.parametrize(("kind", "carriers"), CARRIERS.items())
def test_every_kind_is_rendered_in_its_language(lang: str, kind: str, carriers: int) -> None:
    english = {"the", "and", "thousand", "hundred", "kilometers", "kilograms", "meters", "liters", "square", "british"}
    english |= {"dollars", "cents", "tuesday", "march", "pm", "am", "number", "year", "at", "on", "day", "how", "minus"}
    shared = {"de": {"am", "minus"}, "fr": {"dollars"}, "pl": {"minus"}, "cs": {"minus"}}  # also words of the language
    sentences = set()
    for carrier in range(carriers):
        item = Item(kind, carrier, EXAMPLES[kind])
        sentences.add(numerals.render(item, lang))
        assert numerals.render(item, lang) != numerals.render(item, "en")
        words = set(re.findall(r"\w+", numerals.render(item, lang).lower()))
        assert not words & (english - shared.get(lang, set()))
        # For an unknown unit, Babel writes its identifier: 4.312 duration-day.
        assert not re.search(r"\d [a-z]+-[a-z]+", numerals.render(item, lang))
    assert len(sentences) == carriers
    with pytest.raises(IndexError):
        numerals.render(Item(kind, carriers, EXAMPLES[kind]), lang)


def spell_german(number: int) -> str:
    """Cardinals below 10,000, from the grammar."""
    ones = "null ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn "
    words = (ones + "siebzehn achtzehn neunzehn").split()
    tens = ["-", "-", "zwanzig", "dreißig", "vierzig", "fünfzig", "sechzig", "siebzig", "achtzig", "neunzig"]
    if number == 0:
        return words[0]
    text = f"{words[number // 1000]}tausend" if number >= 1000 else ""
    text += f"{words[number % 1000 // 100]}hundert" if number % 1000 >= 100 else ""
    rest = number % 100
    if rest >= 20:
        return text + (f"{words[rest % 10]}und" if rest % 10 else "") + tens[rest // 10]
    return text + ("eins" if rest == 1 else words[rest] if rest else "")


def spell_vietnamese(number: int) -> str:
    """Cardinals below 10,000, from the grammar."""
    digits = ["không", "một", "hai", "ba", "bốn", "năm", "sáu", "bảy", "tám", "chín"]
    thousands, hundreds, tens, ones = (number // 10**power % 10 for power in (3, 2, 1, 0))
    words = [digits[thousands], "nghìn"] if thousands else []
    words += [digits[hundreds], "trăm"] if hundreds or (thousands and number % 100) else []
    if tens:
        words += ["mười"] if tens == 1 else [digits[tens], "mươi"]
    elif ones and words:
        words += ["lẻ"]
    if ones == 5 and tens:
        words += ["lăm"]
    elif ones == 1 and tens > 1:
        words += ["mốt"]
    elif ones or not words:
        words += [digits[ones]]
    return " ".join(words)


@pytest.mark.parametrize(
    ("lang", "before", "spell"),
    [("de", "Die Antwort lautet ", spell_german), ("vi", "Câu trả lời là ", spell_vietnamese)],
)
def test_cardinals_follow_the_grammar(lang: str, before: str, spell: Callable[[int], str]) -> None:
    for number in range(10_000):
        assert numerals.render(Item("cardinal", 0, (number,)), lang) == f"{before}{spell(number)}."


@given(day=st.dates(datetime.date(1900, 1, 1), datetime.date(2050, 12, 31)))
def test_dates_and_weekdays_are_correct(day: datetime.date) -> None:
    written = numerals.render(Item("date", 0, (day.toordinal(),)), "en")
    assert datetime.datetime.strptime(written, "She was born on %B %d, %Y.").date() == day
    weekdays = ["Montag", "Dienstag", "Mittwoch", "Donnerstag", "Freitag", "Samstag", "Sonntag"]
    full = numerals.render(Item("date", 2, (day.toordinal(),)), "de")
    assert full.startswith(f"Heutiges Datum: {weekdays[day.weekday()]}, {day.day}. ")
    assert full.endswith(f" {day.year}.")


@given(minute=st.integers(0, 24 * 60 - 1))
def test_times_are_correct(minute: int) -> None:
    written = numerals.render(Item("time", 1, (minute,)), "en")
    moment = datetime.datetime.strptime(written, "The train leaves at %I:%M %p.")
    assert (moment.hour, moment.minute) == divmod(minute, 60)
    assert numerals.render(Item("time", 1, (minute,)), "de") == f"Der Zug fährt um {moment:%H:%M} Uhr ab."


@pytest.mark.parametrize(
    ("lang", "item", "sentence"),
    [
        ("en", Item("cardinal", 0, (4312,)), "The answer is four thousand, three hundred and twelve."),
        ("en", Item("year", 0, (1984,)), "The church was built in nineteen eighty-four."),
        ("en", Item("money", 4, (4312, 5)), "Price including tax: €4,312.05."),
        ("de", Item("cardinal", 0, (21,)), "Die Antwort lautet einundzwanzig."),
        ("de", Item("ordinal", 0, (412,)), "Heute ist der vierhundertzwölfte Tag der Reise."),
        ("de", Item("year", 4, (1984,)), "Erscheinungsjahr: neunzehnhundertvierundachtzig."),
        ("de", Item("money", 6, (101, 25)), "Auf der Quittung steht: einhundertein Euro und fünfundzwanzig Cent."),
        ("de", Item("quantity", 3, (2962,)), "Der Berg ist 2.962 Meter hoch."),
        ("fr", Item("cardinal", 0, (71,)), "La réponse est soixante et onze."),
        ("fr", Item("cardinal", 0, (280,)), "La réponse est deux cent quatre-vingts."),
        ("fr", Item("ordinal", 1, (280,)), "Voici le deux cent quatre-vingtième visiteur."),
        ("fr", Item("ordinal", 1, (700,)), "Voici le sept centième visiteur."),
        ("fr", Item("date", 0, (datetime.date(1997, 5, 1).toordinal(),)), "Elle est née le 1er mai 1997."),
        ("fr", Item("date", 0, (datetime.date(1997, 5, 21).toordinal(),)), "Elle est née le 21 mai 1997."),
        ("es", Item("cardinal", 0, (526,)), "La respuesta es quinientos veintiséis."),
        ("es", Item("ordinal", 0, (121,)), "Hoy es el 121.er día del viaje."),
        ("es", Item("ordinal", 0, (111,)), "Hoy es el 111.º día del viaje."),
        ("es", Item("time", 1, (65,)), "El tren sale a la 1:05."),
        ("es", Item("time", 1, (11 * 60 + 5,)), "El tren sale a las 11:05."),
        ("es", Item("money", 6, (231, 5)), "El recibo dice: doscientos treinta y un euros y cinco céntimos."),
        ("it", Item("cardinal", 0, (123,)), "La risposta è centoventitré."),
        ("it", Item("ordinal", 0, (8,)), "Oggi è l'ottavo giorno del viaggio."),
        ("it", Item("ordinal", 2, (11,)), "L'undicesimo test è riuscito."),
        ("it", Item("date", 0, (datetime.date(1997, 3, 8).toordinal(),)), "È nata l'8 marzo 1997."),
        (
            "it",
            Item("date", 3, (datetime.date(1997, 3, 11).toordinal(),)),
            "Il contratto è valido fino all'11 marzo 1997.",
        ),
        (
            "it",
            Item("date", 3, (datetime.date(1997, 3, 18).toordinal(),)),
            "Il contratto è valido fino al 18 marzo 1997.",
        ),
        ("pt", Item("cardinal", 0, (1116,)), "A resposta é mil cento e dezasseis."),
        ("pt", Item("time", 1, (65,)), "O comboio parte à 01:05."),
        ("nl", Item("cardinal", 0, (22,)), "Het antwoord is tweeëntwintig."),
        ("nl", Item("cardinal", 0, (100,)), "Het antwoord is honderd."),
        ("nl", Item("year", 0, (1984,)), "De kerk werd gebouwd in negentienhonderdvierentachtig."),
        ("nl", Item("year", 3, (1100,)), "Wat gebeurde er in elfhonderd?"),
        ("pl", Item("cardinal", 0, (4312,)), "Odpowiedź brzmi: cztery tysiące trzysta dwanaście."),
        ("pl", Item("ordinal", 0, (412,)), "Dziś jest czterysta dwunasty dzień podróży."),
        ("pl", Item("ordinal", 0, (300,)), "Dziś jest trzechsetny dzień podróży."),
        ("pl", Item("quantity", 0, (22,)), "Odległość do wybrzeża wynosi 22 kilometry."),
        ("pl", Item("quantity", 0, (12,)), "Odległość do wybrzeża wynosi 12 kilometrów."),
        ("cs", Item("cardinal", 0, (2560,)), "Odpověď zní: dva tisíce pět set šedesát."),
        ("cs", Item("cardinal", 0, (10,)), "Odpověď zní: deset."),
        ("cs", Item("date", 0, (datetime.date(1997, 3, 4).toordinal(),)), "Narodila se 4. března 1997."),
        ("vi", Item("ordinal", 1, (4,)), "Đây là vị khách thứ tư."),
        ("vi", Item("ordinal", 1, (41,)), "Đây là vị khách thứ bốn mươi mốt."),
        ("vi", Item("sum", 2, (5, 1005, 1010)), "Hỏi năm cộng một nghìn không trăm lẻ năm bằng bao nhiêu?"),
    ],
)
def test_sentences_equal_handwritten_ones(lang: str, item: Item, sentence: str) -> None:
    assert numerals.render(item, lang) == sentence


def test_sums_are_correct(items: dict[str, list[Item]]) -> None:
    sums = [item.value for item in items["train"] if item.kind == "sum"]
    assert sums
    assert all(a + b == total for a, b, total in sums)


def test_unknown_language_error_lists_the_known_languages() -> None:
    with pytest.raises(UserError, match=r"'deu'.*en, de, fr, .*did you mean 'de'"):
        numerals.render(Item("cardinal", 0, (1,)), "deu")
    with pytest.raises(UserError, match="no language 'klingon'"):
        numerals.pairs("train", "en", "klingon", 1)  # at the call, not at the first pair
    with pytest.raises(UserError, match="no language ''"):
        numerals.pairs("train", "", "en", 1)


def test_unknown_splits_are_rejected() -> None:
    with pytest.raises(UserError, match="no split 'dev'; splits are train, valid, test"):
        numerals.items("dev", 1)
    with pytest.raises(UserError, match="no split 'Train'"):
        numerals.pairs("Train", "en", "de", 1)


@pytest.mark.parametrize("count", [-1, 10**9])
def test_impossible_counts_are_rejected(count: int) -> None:
    with pytest.raises(UserError, match=rf"{count} items requested from valid"):
        numerals.items("valid", count)
    assert list(numerals.items("valid", 0)) == []
