"""The papers' data sets: each config reads text in its own format, offline, and makes batches."""

import importlib
import itertools
from pathlib import Path
from typing import Any

import pytest

from branchnorm_jax.config import from_config_dict
from branchnorm_jax.data.batches import make_plans
from branchnorm_jax.data.corpus import read_pairs
from branchnorm_jax.data.prepare import prepare
from branchnorm_jax.options import DataConfig

COUNTS = {"train": 60, "valid": 4, "test": 5}


def sentence(lang: str, split: str, index: int) -> str:
    return f"{lang} {split} {'abcdefghij' * (index % 3 + 1)} {index}"


def write_text(folder: Path, data: DataConfig, pattern: str) -> None:
    """Writes the files that the docstring of the config describes."""
    names = {"train": data.train_split, "valid": data.valid_split, "test": data.test_split}
    for direction in data.directions():
        languages = direction.source_lang, direction.target_lang
        for split, lang in itertools.product(COUNTS, languages):
            name = pattern.format(split=names[split], lang=lang, pair="-".join(sorted(languages)))
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = [sentence(lang, split, index) for index in range(COUNTS[split])]
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_tfds(folder: Path, name: str, languages: tuple[str, ...]) -> None:
    """Writes a data set with TFDS, under the name of the real builder and with its features."""
    import tensorflow_datasets as tfds

    multilingual = name.startswith("ted")
    version = "1.1.0" if multilingual else "1.0.0"  # the version of the registered builder
    features = (
        tfds.features.FeaturesDict(
            {
                "talk_name": tfds.features.Text(),
                "translations": tfds.features.TranslationVariableLanguages(languages=languages),
            }
        )
        if multilingual
        else tfds.features.Translation(languages=languages)
    )

    class MockCorpus(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
        name = "mock_corpus"
        VERSION = tfds.core.Version(version)

        def _info(self) -> Any:
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager: Any) -> Any:
            splits = {"train": "train", "validation": "valid", "test": "test"}
            return {there: self._generate_examples(here) for there, here in splits.items()}

        def _generate_examples(self, split: str) -> Any:
            for index in range(COUNTS[split]):
                texts = {lang: sentence(lang, split, index) for lang in languages}
                yield index, {"talk_name": "t", "translations": texts} if multilingual else texts

    made = folder / "made" / name.replace("/", "-")
    MockCorpus(data_dir=made, file_format="array_record").download_and_prepare()
    wanted = folder / name / version
    wanted.parent.mkdir(parents=True, exist_ok=True)
    (made / "mock_corpus" / version).rename(wanted)
    builder = name.partition("/")[0]
    for path in list(wanted.iterdir()):
        if path.suffix == ".json":
            path.write_text(path.read_text().replace("mock_corpus", builder))
        path.rename(wanted / path.name.replace("mock_corpus", builder))


CASES: dict[str, dict[str, tuple[str, ...]] | str] = {
    "wmt17_ende": {"wmt17_translate/de-en": ("de", "en"), "wmt14_translate/de-en": ("de", "en")},
    "wmt14_enfr": {"wmt14_translate/fr-en": ("fr", "en")},
    "ted": {"ted_multi_translate": ("ar", "en", "gl", "he", "sk")},
    "iwslt14_deen": "{split}.{lang}",
    "iwslt15_envi": "{split}.{lang}",
    "multi30k_ende": "{split}.{lang}",
    "multi30k_many": "{split}.{lang}",
    "opus100": "supervised/{pair}/opus.{pair}-{split}.{lang}",
    "multiun": "{split}.{pair}.{lang}",
}


@pytest.mark.parametrize("name", CASES)
def test_config_reads_its_data_set(tmp_path: Path, name: str) -> None:
    options = importlib.import_module(f"configs.{name}").get_config("2L-3L")
    options.data.vocab_size = 60
    options.data.vocab_type = "bpe"
    if name == "opus100":
        assert len(from_config_dict(options).data.directions()) == 2 * 94
        # Files of all 188 directions would only take longer to write.
        options.data.pairs = "en-de+zh+xh,de+zh+xh-en"
    if name == "multiun":
        options.data.vocab_size = 90
    case = CASES[name]
    if isinstance(case, str):
        options.data.path = str(tmp_path / "text")
        write_text(tmp_path / "text", from_config_dict(options).data, case)
    else:
        options.data.tfds_dir = str(tmp_path)
        for builder, languages in case.items():
            write_tfds(tmp_path, builder, languages)
    config = from_config_dict(options)
    assert (config.model.encoder_layers, config.model.decoder_layers) == (2, 3)
    for direction in config.data.directions():
        for split, count in COUNTS.items():
            pairs = sorted(read_pairs(direction, split))
            languages = direction.source_lang, direction.target_lang
            assert pairs == sorted(
                tuple(sentence(lang, split, index) for lang in languages) for index in range(count)
            ), (direction.pair, split)
    corpus = prepare(config.data, tmp_path / "run", lambda line: None)
    plan, _ = make_plans(config.data, corpus.train, corpus.valid, config.train.batch_tokens, 0)
    assert plan.batch_at(0).target.any()
