"""The page of the server for models of several languages, in a browser."""

import socket
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from branchnorm_jax.data.tokenizer import train_tokenizer
from branchnorm_jax.decoding.languages import Languages
from branchnorm_jax.modes.serve import about
from branchnorm_jax.options import Config, DataConfig, DecodeConfig, ServeConfig
from branchnorm_jax.serving.access import Access
from branchnorm_jax.serving.app import starting
from branchnorm_jax.serving.messages import TranslationRequest, to_json
from tests.modes.test_serve import Device, ask, browser, serving  # noqa: F401

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
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Languages, dict[str, Any]]:
    """Languages with one script, with two, with the same name, and with no name; not all are sources."""
    pairs = "eng_Latn+zho_Hans+deu_Latn-arb_Arab+deu_Latn+zho_Hans+zho_Hant+aka_Latn+twi_Latn+eng_Latn+pbt_Arab"
    data = DataConfig(vocab_size=32, pairs=pairs, tags="each")
    text = [("one two three four five six", "eins zwei drei")] * 2
    languages = Languages(data, train_tokenizer(data, text, tmp_path_factory.mktemp("vocabulary") / "v"))
    config = Config(data=data, decode=DecodeConfig(source_lang="eng_Latn", target_lang="arb_Arab"))
    return languages, about(config, 7, languages)


@pytest.fixture(scope="module")
def url(model: tuple[Languages, dict[str, Any]]) -> Iterator[str]:
    """The address of a server of these languages."""
    languages, health = model
    with serving(Named(languages), [], languages=languages, about=health) as address:
        yield address


class Unusual(Device):
    """Translates "none" to nothing, "long" with many attention weights, and other lines with none."""

    def __call__(self, requests: Sequence[TranslationRequest]) -> list[bytes]:
        (line,) = requests[0].lines
        one: dict[str, Any] = {"text": line.upper(), "score": 0, "log_prob": 0}
        if line == "long":
            pieces = ["a"] * 300
            one |= {"pieces": pieces, "source_pieces": pieces, "alignment": [[0.5] * 300] * 300}
        return [to_json({"translations": [[] if line == "none" else [one, one | {"text": "OTHER"}]]})]


class Ranked(Device):
    """Gives each line as many translations as were asked for, with a warning about the second."""

    def __call__(self, requests: Sequence[TranslationRequest]) -> list[bytes]:
        (request,) = requests
        scores = {"score": 0, "log_prob": 0, "pieces": []}
        warnings = [{}, {"warnings": ["it is second"]}, *[{}] * 3]
        ranked = [{"text": f"T{rank}"} | scores | warnings[rank] for rank in range(request.nbest)]
        return [to_json({"translations": [ranked for _ in request.lines]})]


def open_page(page: Any, url: str) -> Any:
    """Loads the page and waits until it has the languages."""
    from selenium.webdriver.support.ui import WebDriverWait

    page.get(url)
    wait = WebDriverWait(page, 60)
    wait.until(lambda _: page.title != "Translation")
    return wait


def texts_of(page: Any, selector: str) -> list[str]:
    """Returns the texts of the elements that a CSS selector finds."""
    return [each.text for each in page.find_elements("css selector", selector)]


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


def test_languages_are_swapped_with_the_text_and_remembered(url: str, browser: Any) -> None:  # noqa: F811
    """By keyboard, and only where the server translates in the other direction."""
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import Select

    def choose(menu: str, name: str) -> None:
        Select(browser.find_element("id", menu)).select_by_visible_text(name)

    def best() -> list[str]:
        return texts_of(browser, ".best")

    wait = open_page(browser, url)
    swap, box = browser.find_element("id", "swap"), browser.find_element("id", "text")
    assert swap.accessible_name == "Swap languages"
    assert not swap.is_enabled()  # Arabic is not a source language
    choose("target_lang", "German")
    assert swap.is_enabled()
    box.send_keys("one", Keys.ENTER, Keys.ENTER, "two", Keys.CONTROL, Keys.ENTER)
    wait.until(lambda _: best() == ["ONE >>eng_Latn<< >>deu_Latn<<", "TWO >>eng_Latn<< >>deu_Latn<<"])
    wait.until(lambda _: browser.find_element("id", "translate").is_enabled())
    swap.send_keys(Keys.ENTER)
    assert chosen(browser) == ["deu_Latn", "eng_Latn"]
    text = "ONE >>eng_Latn<< >>deu_Latn<<\n\nTWO >>eng_Latn<< >>deu_Latn<<"
    assert box.get_property("value") == text
    wait.until(lambda _: best() == [f"{line.upper()} >>deu_Latn<< >>eng_Latn<<" for line in text.split("\n\n")])
    wait.until(lambda _: browser.find_element("id", "translate").is_enabled())
    box.send_keys(" and more")  # The translation is no longer that of the text.
    swap.send_keys(Keys.SPACE)
    assert (chosen(browser), box.get_property("value")) == (["eng_Latn", "deu_Latn"], text + " and more")

    swap.click()
    open_page(browser, url)
    assert chosen(browser) == ["deu_Latn", "eng_Latn"]
    # Languages of another model at the same address, and what other pages stored, are ignored.
    for stored in ('["fr", "deu_Latn"]', "[", "7"):
        browser.execute_script("localStorage.setItem('languages', arguments[0])", stored)
        open_page(browser, url)
        assert chosen(browser) == ["eng_Latn", "deu_Latn" if "deu_Latn" in stored else "arb_Arab"]
    forbid = "Object.defineProperty(window, 'localStorage', {get() { throw new DOMException('', 'SecurityError'); }})"
    browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": forbid})
    open_page(browser, url)
    choose("target_lang", "German")
    assert chosen(browser) == ["eng_Latn", "deu_Latn"]
    assert browser.get_log("browser") == []


def test_each_translation_has_the_tag_and_direction_of_its_language(url: str, browser: Any) -> None:  # noqa: F811
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    wait = open_page(browser, url)
    lines = Keys.ENTER.join(("one", ">>zho_Hant<<two", ">>eng_Latn<< three"))
    browser.find_element("id", "text").send_keys(lines, Keys.CONTROL, Keys.ENTER)
    wait.until(lambda _: len(browser.find_elements(By.CSS_SELECTOR, ".best")) == 3)
    best = browser.find_elements(By.CSS_SELECTOR, ".best")
    assert [(each.get_attribute("lang"), each.get_attribute("dir")) for each in best] == [
        ("arb-Arab", "rtl"),
        ("zho-Hant", "ltr"),
        ("eng-Latn", "ltr"),
    ]
    assert [each.text.split()[-1] for each in best] == [">>arb_Arab<<", ">>zho_Hant<<", ">>eng_Latn<<"]


def test_menus_are_aligned_on_narrow_screens(url: str, browser: Any) -> None:  # noqa: F811
    metrics = {"width": 390, "height": 760, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    open_page(browser, url)
    first, second = (browser.find_element("id", menu).rect for menu in MENUS)
    assert (first["x"], first["width"]) == (second["x"], second["width"])
    assert first["y"] + first["height"] <= second["y"]
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390


def test_page_of_a_server_that_starts_becomes_ready(model: tuple[Languages, dict[str, Any]], browser: Any) -> None:  # noqa: F811
    """The page shows the progress, keeps what was typed, and needs no reload."""
    from selenium.webdriver.support.ui import WebDriverWait

    wait, (languages, health) = WebDriverWait(browser, 60), model
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    doing = ["loading"]
    with starting(listener, ServeConfig(), Access(), lambda: doing[0]):
        browser.get(address)
        status = browser.find_element("id", "status")
        for doing[0] in ("loading", "compiling"):
            wait.until(lambda _: status.text == f"the server is starting: {doing[0]}")
        browser.find_element("id", "text").send_keys("one")
        for path, body in (("/health", None), ("/translate", b"{}"), ("/other", None)):
            code, headers, answer = ask(address + path, body)
            assert (code, answer) == (503, {"error": "the server is starting: compiling"})
            assert int(headers["retry-after"]) > 0
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(address)
        assert (error.value.code, error.value.headers["cache-control"]) == (503, "no-store")
        assert "default-src 'none'" in error.value.headers["content-security-policy"]
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(urllib.request.Request(address, headers={"host": "evil.example"}))
    with serving(Named(languages), [], languages=languages, about=health, at=listener):
        wait.until(lambda _: browser.title != "Translation")
        assert status.text == ""
        assert browser.find_element("id", "text").get_property("value") == "one"
        assert chosen(browser) == ["eng_Latn", "arb_Arab"]


@pytest.mark.parametrize(
    ("line", "best", "said"),
    [
        ("none", "", "Warning: not translated: no translation was found."),
        ("long", "LONG", "The 90,000 attention weights are too many to show; translate a shorter text."),
        ("cut", "CUT", "No attention weights."),
    ],
)
def test_unusual_answers_are_shown(
    model: tuple[Languages, dict[str, Any]],
    browser: Any,  # noqa: F811
    line: str,
    best: str,
    said: str,
) -> None:
    from selenium.webdriver.common.keys import Keys

    def texts(selector: str) -> list[str]:
        return texts_of(browser, selector)

    languages, health = model
    with serving(Unusual(), [], languages=languages, about=health) as address:
        wait = open_page(browser, address)
        browser.find_element("id", "text").send_keys(line, Keys.CONTROL, Keys.ENTER)
        wait.until(lambda _: said in texts(".warning") + texts(".scroll"))
        assert (texts(".best"), texts("#error")) == ([best], [""])
        assert texts("fieldset bdi") == ([best, "OTHER"] if best else [])


def test_lines_warnings_and_focus_are_those_of_the_text(model: tuple[Languages, dict[str, Any]], browser: Any) -> None:  # noqa: F811
    """Lines keep their numbers, each translation has its own warnings, and the button keeps the focus."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    def texts(selector: str) -> list[str]:
        return texts_of(browser, selector)

    languages, health = model
    with serving(Ranked(), [], languages=languages, about=health) as address:
        wait = open_page(browser, address)
        box, button = (browser.find_element("id", name) for name in ("text", "translate"))
        box.send_keys(Keys.ENTER, Keys.ENTER, "one", Keys.ENTER, Keys.ENTER, ">>no<< two")
        button.send_keys(Keys.ENTER)
        wait.until(lambda _: texts("#error")[0].startswith("line 5: this model was trained to"))
        assert browser.switch_to.active_element == button
        box.clear()
        box.send_keys(Keys.ENTER, "one", Keys.ENTER, " ", Keys.ENTER, "two", Keys.CONTROL, Keys.ENTER)
        wait.until(lambda _: texts(".source") == ["one", "two"])
        assert browser.switch_to.active_element == box
        summaries = browser.find_elements(By.CSS_SELECTOR, "summary")
        assert [each.accessible_name for each in summaries] == ["Details of line 2", "Details of line 4"]
        summaries[1].click()
        choices = wait.until(lambda _: browser.find_elements(By.CSS_SELECTOR, "article input"))
        assert (texts(".best"), texts(".warning")) == (["T0", "T0"], [])
        choices[1].click()
        assert (texts(".best"), texts(".warning")) == (["T0", "T1"], ["Warning: it is second."])
        choices[2].click()
        assert (texts(".best"), texts(".warning")) == (["T0", "T2"], [])
        # "Copy all" keeps the blank lines.
        browser.execute_script("navigator.clipboard.writeText = (text) => { document.copied = text; }")
        browser.find_element("id", "copy").click()
        assert browser.execute_script("return document.copied") == "\nT0\n\nT2"


def test_an_open_page_follows_the_server(model: tuple[Languages, dict[str, Any]], browser: Any) -> None:  # noqa: F811
    """After a new start with a smaller beam, the page needs no reload and keeps the languages that were chosen."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import Select

    def answers(text: str) -> int:
        browser.find_element("id", "text").send_keys(text, Keys.CONTROL, Keys.ENTER)
        wait.until(lambda _: browser.find_elements(By.CSS_SELECTOR, "article input"))
        wait.until(lambda _: browser.find_element("id", "translate").is_enabled())
        return len(browser.find_elements(By.CSS_SELECTOR, "article input"))

    languages, health = model
    with serving(Ranked(), [], languages=languages, about=health) as address:
        wait = open_page(browser, address)
        assert answers("one") == DecodeConfig().beam_size
        Select(browser.find_element("id", "target_lang")).select_by_visible_text("German")
    again = socket.create_server(("127.0.0.1", int(address.rpartition(":")[2])))
    small = DecodeConfig(beam_size=2)
    health = health | {"decode": health["decode"] | {"beam_size": 2}}
    with serving(Ranked(), [], languages=languages, about=health, at=again, decode=small):
        assert answers(" two") == 2
        assert browser.find_element("id", "error").text == ""
        assert chosen(browser) == ["eng_Latn", "deu_Latn"]
        assert browser.find_element("id", "model").text.endswith("beam of 2")
