"""TFDS data sets as a corpus, read through array_record, which does not need tensorflow."""

import difflib
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from branchnorm_jax.data.formats import Pair, one_line
from branchnorm_jax.errors import UserError, needs_extra
from branchnorm_jax.options import DataConfig


def pairs(config: DataConfig, split: str) -> Iterator[Pair]:
    """Streams the sentence pairs of a split; see `corpus.read_pairs`.

    Args:
      config: specifies the data set and the languages.
      split: name of the split in the data set.
    """
    builder, name = _split(config, split)
    read = _reader(builder, config)
    for number, example in enumerate(builder.as_data_source(split=name)):
        try:
            yield read(example)
        except UnicodeDecodeError as error:
            raise UserError(f"{builder.info.full_name}, {name}, example {number}: not valid UTF-8") from error


def version(config: DataConfig, split: str) -> dict[str, Any]:
    """Returns values that change when the text of a split changes; see `corpus.corpus_key`."""
    builder, name = _split(config, split)
    return {
        "split": name,
        "builder": builder.info.full_name,
        "folder": str(builder.data_path),
        "size": [builder.info.splits.total_num_examples, int(builder.info.dataset_size)],
    }


def _split(config: DataConfig, split: str) -> tuple[Any, str]:
    """Returns the builder, prepared as array_record, and the name of the split in it.

    The builder is the one named by `data.path`, unless the split names another builder, as in
    wmt14_translate/de-en:test.
    """
    folder, path, name = os.path.expanduser(config.tfds_dir) or None, config.path, split
    if "/" in name:
        path, _, name = name.partition(":")
        if not name:
            raise UserError(f"config: the split {path!r} names a data set but no split; write for example {path}:test")
    try:
        builder = _named(path.replace("{pair}", config.pair), folder)
    except UserError:
        if "{pair}" not in path:
            raise
        builder = _named(path.replace("{pair}", config.either_pair[1]), folder)
    file_format = builder.info.file_format.value if builder.is_prepared() else ""
    if file_format != "array_record":
        place = f", data_dir={folder!r}" if folder else ""
        name = builder.info.full_name.rpartition("/")[0]
        code = (
            f"import tensorflow_datasets as tfds, tensorflow_datasets.translate; "
            f"tfds.builder({name!r}{place}, file_format='array_record').download_and_prepare()"
        )
        fault = (
            f"is prepared as {file_format}, which needs tensorflow; remove it and"
            if file_format
            else "is not prepared;"
        )
        raise UserError(f'{builder.info.full_name} {fault} run: python -c "{code}"')
    try:
        empty = not builder.info.splits[name].num_examples
    except (KeyError, ValueError):
        empty = True
    if empty:
        splits = ", ".join(builder.info.splits)
        raise UserError(f"{builder.info.full_name}: no examples in split {name!r}; splits are {splits}")
    return builder, name


def _named(name: str, folder: str | None) -> Any:
    """Returns the builder with this name, whether prepared or not."""
    with needs_extra("tfds", "data.source=tfds"):
        import tensorflow_datasets as tfds
        import tensorflow_datasets.translate  # registers the WMT builders, a plain import does not
    try:
        return tfds.builder(name, data_dir=folder)
    except tfds.core.DatasetNotFoundError as error:
        known = tfds.list_builders(with_community_datasets=False)
        close = difflib.get_close_matches(name.split("/")[0], known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UserError(f"data.path={name}: TFDS has no such data set{hint}") from error
    except (ValueError, AssertionError, RuntimeError) as error:
        if os.path.isdir(name):
            raise UserError(
                f"data.path={name}: data.source=tfds needs the name of a data set, such as wmt17_translate/de-en; for "
                "a folder of files, set data.source=text"
            ) from error
        # The reasons of TFDS are long texts, with the names that it knows.
        raise UserError(textwrap.shorten(f"data.path={name}: {error}", 390, placeholder=" ...")) from error


def _reader(builder: Any, config: DataConfig) -> Callable[[Mapping[str, Any]], Pair]:
    """Returns a function that extracts the sentence pair from an example."""
    import tensorflow_datasets as tfds

    languages = (config.source_lang, config.target_lang)
    features = builder.info.features if isinstance(builder.info.features, tfds.features.FeaturesDict) else {}
    if set(languages) <= set(features):
        return lambda example: (_text(example[languages[0]]), _text(example[languages[1]]))

    for key, feature in features.items():
        if isinstance(feature, tfds.features.TranslationVariableLanguages) and set(languages) <= set(feature.languages):
            return lambda example: _choose(example[key], languages)

    # For keys such as src and dst, only the config's name ("en-fr", "en_to_fr") tells the languages.
    keys = builder.info.supervised_keys or ()
    named = re.split("-|_to_", builder.builder_config.name) if builder.builder_config else []
    if sorted(named) == sorted(languages) and len(keys) == 2 and set(keys) <= set(features):
        key_of = dict(zip(named, keys, strict=True))
        return lambda example: (_text(example[key_of[languages[0]]]), _text(example[key_of[languages[1]]]))

    names = ", ".join(features) or "no text"
    raise UserError(
        f"{builder.info.full_name} has no pair {'-'.join(languages)}; its features are {names}; "
        f"change data.source_lang and data.target_lang"
    )


def _choose(translations: Mapping[str, Any], languages: tuple[str, str]) -> Pair:
    """Selects two languages from a multilingual example; a missing language gives ""."""
    texts = dict(zip(map(_text, translations["language"]), map(_text, translations["translation"]), strict=False))
    return texts.get(languages[0], ""), texts.get(languages[1], "")


def _text(value: bytes | str) -> str:
    """Converts a TFDS value to one line of text.

    Values are bytes or str, depending on the data set.
    """
    return one_line(value.decode("utf-8") if isinstance(value, bytes) else str(value))
