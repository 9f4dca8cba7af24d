"""The page of the server for models of several languages, in a browser."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from branchnorm_jax.data.tokenizer import train_tokenizer
from branchnorm_jax.decoding.languages import Languages
from branchnorm_jax.modes.serve import about
from branchnorm_jax.options import Config, DataConfig, DecodeConfig
from branchnorm_jax.serving.messages import TranslationRequest, to_json
from tests.modes.test_serve import Device, browser, serving  # noqa: F401

MENUS = "source_lang", "target_lang"


class Named(Device):
    """Translates each line to its upper case and the tags of its languages."""

    def __init__(self, languages: Languages) -> None:
        super().__init__()
        self.pieces = languages.tokenizer.source_pieces

    def __call__(self, requests: Sequence[TranslationRequest]) -> list[bytes]:
        (request,) = requests
        texts = [
            " ".join([line.upper(), *(self.pieces[index] for index in (*tags.source, *tags.target))])
            for line, tags in zip(request.lines, request.tags, strict=True)
        ]
        scores = {"score": 0, "log_prob": 0, "pieces": []}
        return [to_json({"translations": [[{"text": text} | scores] for text in texts]})]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of languages with one script, with two, with the same name, and with no name; not all are sources."""
    pairs = "eng_Latn+zho_Hans+deu_Latn-arb_Arab+deu_Latn+zho_Hans+zho_Hant+aka_Latn+twi_Latn+eng_Latn+pbt_Arab"
    data = DataConfig(vocab_size=32, pairs=pairs, tags="each")
    text = [("one two three four five six", "eins zwei drei")] * 2
    languages = Languages(data, train_tokenizer(data, text, tmp_path_factory.mktemp("vocabulary") / "v"))
    config = Config(data=data, decode=DecodeConfig(source_lang="eng_Latn", target_lang="arb_Arab"))
    with serving(Named(languages), [], languages=languages, about=about(config, 7, languages)) as address:
        yield address


def open_page(page: Any, url: str) -> Any:
    """Loads the page and waits until it has the languages."""
    from selenium.webdriver.support.ui import WebDriverWait

    page.get(url)
    wait = WebDriverWait(page, 60)
    wait.until(lambda _: page.title != "Translation")
    return wait


def chosen(page: Any) -> list[str]:
    """Returns the codes of the chosen languages."""
    return [page.find_element("id", menu).get_property("value") for menu in MENUS]


def test_menus_have_different_names_in_alphabetical_order(url: str, browser: Any) -> None:  # noqa: F811
    open_page(browser, url)
    menus = [browser.find_elements("css selector", f"#{menu} option") for menu in MENUS]
    chinese = ["Chinese (Simplified)", "Chinese (Traditional)"]
    assert [[option.text for option in menu] for menu in menus] == [
        [chinese[0], "English", "German"],
        ["Akan (aka_Latn)", "Akan (twi_Latn)", "Arabic", *chinese, "English", "German", "pbt_Arab"],
    ]
    assert menus[1][3].get_property("value") == "zho_Hans"
    assert chosen(browser) == ["eng_Latn", "arb_Arab"]
    assert browser.title == f"{chinese[0]}, English, German → " + ", ".join(option.text for option in menus[1])
