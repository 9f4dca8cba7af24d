"""Options: accepted values, rejected values and error messages."""

import copy
import dataclasses
import itertools
import json
import math

import ml_collections
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from branchnorm_jax import config as options
from branchnorm_jax.config import (
    assigned,
    default_config,
    from_config_dict,
    to_flat,
    with_alpha_steps,
    with_recommended,
)
from branchnorm_jax.errors import StorageError, UserError
from branchnorm_jax.model.methods import METHODS
from branchnorm_jax.options import Config, ModelConfig, TrainConfig, fields, sections
from configs import lm


def rejected(values, *parts):
    """Returns whether the values are rejected with a one-line error. Checks that the error contains `parts`."""
    with pytest.raises(UserError) as raised:
        from_config_dict(values)
    message = str(raised.value)
    assert [part for part in parts if part not in message] == [], message
    return "\n" not in message


def valid_values(field):
    """Returns a strategy for values of the option's type, within its choices and range."""
    meta, default = field.metadata, field.default
    if meta["choices"]:
        return st.sampled_from(meta["choices"])
    if isinstance(default, bool):
        return st.booleans()
    low, high = meta["minimum"], meta["maximum"]
    if isinstance(default, int):
        return st.integers(low, high if high is not None else 10**6)
    if isinstance(default, float):
        return st.floats(low, high, allow_nan=False, allow_infinity=False)
    return st.text(max_size=8)


def test_defaults_are_valid_and_preserved():
    assert from_config_dict(options.default_config()) == from_config_dict({}) == Config()


def test_options_that_scripts_use_exist():
    names = {name for name, _ in fields()}
    promised = {
        "model": "method encoder_layers decoder_layers width ffn_width heads dropout dtype carry_dtype alpha_steps "
        "alpha_schedule remat",
        "train": "steps epochs seed batch_tokens learning_rate warmup_steps eval_every checkpoint_every",
        "data": "source path source_lang target_lang vocab_size",
        "decode": "beam_size length_penalty length_penalty_kind",
    }
    assert {f"{section}.{name}" for section in promised for name in promised[section].split()} <= names


@pytest.mark.parametrize(("name", "field"), list(fields()), ids=lambda value: value if isinstance(value, str) else "")
def test_every_option_has_help_and_a_valid_default(name, field):
    section, option = name.split(".")
    assert field.metadata["help"]
    assert options.to_flat(from_config_dict({section: {option: field.default}}))[name] == field.default


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("model.widht", "model.width"),
        ("model.learning_rate", "train.learning_rate"),
        ("data.max_lenght", "data.max_length"),
        ("train.width", "model.width"),
        ("train.dropout", "model.dropout"),
        ("model.seed", "train.seed"),
        ("train.beam_size", "decode.beam_size"),
        ("train.beam_sise", "decode.beam_size"),
        ("train.lr", "train.learning_rate"),
    ],
)
def test_unknown_options_get_the_nearest_name(name, hint):
    section, option = name.split(".")
    assert rejected({section: {option: 1}}, repr(name), f"did you mean {hint!r}")


def test_dissimilar_names_get_no_hint():
    assert rejected({"model": {"qqqqzzzz": 1}}, "'model.qqqqzzzz'")
    assert options.nearest_name("zzzz.qqqq") == ""


def test_unknown_section_error_lists_the_known_sections():
    assert rejected({"modle": {}}, "'modle'", *sections(Config()))


@pytest.mark.parametrize(
    ("section", "name", "value", "type_name"),
    [
        ("model", "width", "512", "int"),
        ("model", "width", 512.0, "int"),
        ("model", "width", True, "int"),
        ("model", "width", None, "int"),
        ("model", "dropout", "0.1", "float"),
        ("model", "dropout", True, "float"),
        ("model", "remat", True, "str"),
        ("model", "method", 3, "str"),
    ],
)
def test_wrong_types_are_rejected(section, name, value, type_name):
    assert rejected({section: {name: value}}, f"{section}.{name} must be {type_name}", repr(value))


def test_ints_are_accepted_for_floats():
    value = from_config_dict({"decode": {"length_penalty": 1}}).decode.length_penalty
    assert (value, type(value)) == (1.0, float)


@pytest.mark.parametrize(
    ("section", "name", "value", "bound"),
    [
        ("model", "decoder_layers", 0, "minimum 1"),
        ("model", "dropout", -0.1, "minimum 0"),
        ("model", "dropout", 1.0, "maximum 0.99"),
        ("data", "batch_shapes", 65, "maximum 64"),
        ("train", "steps", -1, "minimum 0"),
    ],
)
def test_values_outside_the_range_are_rejected(section, name, value, bound):
    assert rejected({section: {name: value}}, f"{section}.{name}={value}", bound)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["train.learning_rate", "decode.length_penalty", "train.epochs"])
def test_infinite_and_nan_values_are_rejected(name, value):
    section, option = name.split(".")
    assert rejected({section: {option: value}}, f"{name}={value}")


@pytest.mark.parametrize("name", ["adam_b1", "adam_b2"])
def test_adam_betas_of_one_are_rejected(name):
    assert rejected({"train": {name: 1.0}}, f"train.{name}=1.0")  # its bias correction would divide by 1 - 1^t = 0


def test_nul_characters_are_rejected():
    config = default_config()
    config.decode.input = "a\0b"
    with pytest.raises(UserError, match=r"decode.input='a.x00b' has a NUL character"):
        from_config_dict(config)


def test_values_outside_the_choices_are_rejected():
    assert rejected({"model": {"dtype": "float15"}}, "model.dtype='float15'", "float32", "bfloat16")


@pytest.mark.parametrize(
    ("depth", "encoder", "decoder"), [("18L-18L", 18, 18), ("100-6", 100, 6), ("1000L-1L", 1000, 1), ("", 6, 6)]
)
def test_depth_argument_sets_both_stacks(depth, encoder, decoder):
    config = options.default_config(depth)
    assert config.is_locked
    model = from_config_dict(config).model
    assert (model.encoder_layers, model.decoder_layers) == (encoder, decoder)


@pytest.mark.parametrize("depth", ["6L-6L-6L", "-1L-6L", "6L-", "deep", "6l-6l", " 6L-6L", "6.5L-6L"])
def test_invalid_depths_are_rejected(depth):
    with pytest.raises(UserError, match="expected a depth such as 6L-6L") as raised:
        options.default_config(depth)
    assert repr(depth) in str(raised.value)


@pytest.mark.parametrize("depth", ["0L-6L", "6L"])
def test_translation_needs_an_encoder(depth):
    assert rejected(options.default_config(depth), "model.family=encoder_decoder", "needs an encoder")


@pytest.mark.parametrize(
    ("option", "value", "parts"),
    [
        ("model.encoder_layers", 2, ["model.family=decoder has no encoder", "a depth such as 12L"]),
        ("data.source", "text", ["model.family=decoder needs data.source=documents"]),
        ("data.vocab_size", 300, ["data.vocab_size=259"]),
        ("model.shared_embeddings", "inputs", ["model.shared_embeddings=all or none"]),
        ("train.best_metric", "bleu", ["train.best_metric=loss"]),
        ("train.eval_bleu_sentences", 9, ["train.eval_bleu_sentences=0"]),
        ("decode.ensemble", "runs/other", ["decode.ensemble=''"]),
        ("data.train_split", "a:2,b", ["a single corpus"]),
        ("data.max_length", 512, ["data.max_length=256", "the length of its rows is data.context"]),
        ("data.max_ratio", 2.0, ["data.max_ratio=0"]),
        ("data.source_normalization", "nfkc", ["data.source_normalization=nmt_nfkc"]),
        ("data.target_normalization", "nfkc", ["data.target_normalization=nfc"]),
    ],
)
def test_language_models_refuse_options_of_translation(option, value, parts):
    section, name = option.split(".")
    config = lm.get_config("4L")
    config[section][name] = value
    assert rejected(config, *parts)


def test_config_dict_is_locked():
    with pytest.raises(AttributeError):
        options.default_config().model.widht = 3


def test_either_steps_or_epochs_is_required():
    assert rejected(
        {"train": {"steps": 10, "epochs": 1.0}}, "either train.steps or train.epochs", "steps=10", "epochs=1"
    )
    assert rejected({"train": {"steps": 0}}, "either train.steps or train.epochs")
    assert from_config_dict({"train": {"steps": 0, "epochs": 2}}).train.epochs == 2.0


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"model": {"width": 64, "heads": 7}}, ["model.heads=7", "does not divide", "model.width=64"]),
        ({"model": {"width": 65, "heads": 5}}, ["model.width=65", "even"]),
        ({"data": {"shared_vocab": False}}, ["model.shared_embeddings=all", "data.shared_vocab=True"]),
        (
            {"data": {"shared_vocab": False}, "model": {"shared_embeddings": "inputs"}},
            ["model.shared_embeddings=inputs", "data.shared_vocab=True"],
        ),
        ({"model": {"positions": "relative", "relative_buckets": 31}}, ["model.relative_buckets=31", "even"]),
        ({"model": {"positions": "relative", "relative_distance": 16}}, ["relative_distance=16", "half"]),
        ({"model": {"positions": "relative", "kernels": "interpret"}}, ["model.kernels=interpret", "auto or plain"]),
        ({"model": {"positions": "rotary", "decoder_start": "zero"}}, ["positions=rotary", "decoder_start=eos"]),
        ({"data": {"source_lang": "de"}}, ["source_lang", "target_lang", "'de'"]),
        ({"data": {"pairs": "en"}}, ["data.pairs='en'", "'en-en' is not a pair"]),
        ({"data": {"pairs": "en-"}}, ["data.pairs", "not a pair"]),
        ({"data": {"pairs": ","}}, ["data.pairs", "no language pair"]),
        ({"data": {"pairs": "en-de-fr"}}, ["data.pairs", "'en-de-fr'"]),
        ({"data": {"pairs": "en de"}}, ["data.pairs", "not a pair"]),
        ({"data": {"pairs": "en-de+fr", "tags": "none"}}, ["data.tags=none", "de, fr"]),
        ({"evaluate": {"pairs": "en-en"}}, ["evaluate.pairs"]),
        ({"train": {"accumulation": 3}}, ["train.accumulation=3", "data.row_multiple=8"]),
        ({"train": {"batch_tokens": 256}, "data": {"row_multiple": 300}}, ["batch_tokens=256", "raise it to 300"]),
        (
            {
                "model": {"family": "decoder", "encoder_layers": 0},
                "data": {"source": "documents", "vocab_type": "bytes", "vocab_size": 259, "context": 100},
                "train": {"batch_tokens": 799, "best_metric": "loss", "eval_bleu_sentences": 0},
                "decode": {"beam_size": 1},
            },
            ["batch_tokens=799 cannot hold data.row_multiple=8 rows of data.context=100", "raise it to 800"],
        ),
        (
            {
                "model": {"family": "decoder", "encoder_layers": 0},
                "data": {"source": "documents", "vocab_type": "bytes", "vocab_size": 259, "context": 100},
                "train": {"best_metric": "loss", "eval_bleu_sentences": 0},
                "decode": {"beam_size": 1},
                "evaluate": {"stride": 101},
            },
            ["evaluate.stride=101 is more than data.context=100"],
        ),
        ({"train": {"eval_bleu_sentences": 0}}, ["best_metric=bleu", "eval_bleu_sentences"]),
        ({"train": {"eval_bleu_sentences": 0, "keep_best": 0}}, ["best_metric=bleu", "eval_bleu_sentences"]),
        ({"train": {"eval_every": 0, "patience": 3}}, ["train.patience=3", "train.eval_every"]),
        ({"train": {"eval_every": 0, "schedule": "val_decay"}}, ["train.schedule=val_decay", "train.eval_every"]),
        ({"train": {"eval_every": 0, "min_learning_rate": 1e-6}}, ["min_learning_rate=1e-06", "train.eval_every"]),
        ({"train": {"schedule": "range_test", "warmup_init": 0.0}}, ["range_test", "train.warmup_init"]),
        ({"train": {"parent_rate": 0.0}}, ["train.parent_rate=0", "model.grown_from"]),
        ({"train": {"seed": 2**32}}, ["train.seed", "4294967295"]),
        ({"decode": {"min_length": 3 * 10**9}}, ["decode.min_length"]),
        ({"decode": {"streams": 2}, "parallel": {"model": 2}}, ["decode.streams=2", "parallel.model=2"]),
        ({"decode": {"min_length": 9, "max_length_a": 0, "max_length_b": 8}}, ["min_length=9", "max_length_b=8"]),
        ({"train": {"steps": 2 * 10**9}}, ["train.steps=2000000000 is above its maximum 1000000000"]),
        ({"decode": {"length_penalty": -400.0}}, ["decode.length_penalty=-400", "minimum -5"]),
        ({"model": {"decoder_layers": 10**20}}, ["model.decoder_layers", "maximum 1000000"]),
        ({"train": {"batch_tokens": 2**31}}, ["train.batch_tokens=2147483648", "maximum 2147483647"]),
        ({"train": {"best_metric": "comet"}}, ["best_metric=comet needs evaluate.comet"]),
        (
            {"decode": {"constraints": True, "target_prefix": True}},
            ["decode.constraints and decode.target_prefix both"],
        ),
        ({"decode": {"constraints": True, "split": "sentences"}}, ["lines with phrases are not split"]),
        ({"decode": {"glossary": "terms.tsv", "temperature": 1.0}}, ["decode.glossary", "decode.temperature=0"]),
        ({"decode": {"nbest": 5}}, ["decode.nbest=5", "decode.beam_size=4"]),
        ({"decode": {"alignment_layer": 7}}, ["decode.alignment_layer=7", "model.decoder_layers=6"]),
        ({"evaluate": {"splits": "test,train"}}, ["evaluate.splits", "'train'"]),
        ({"evaluate": {"splits": ""}}, ["evaluate.splits"]),
    ],
)
def test_incompatible_options_are_rejected(values, parts):
    assert rejected(values, *parts)


@pytest.mark.parametrize(
    "values",
    [
        {"data": {"shared_vocab": False}, "model": {"shared_embeddings": "decoder"}},
        {"model": {"width": 64, "heads": 7, "head_width": 8}},
        {"train": {"eval_bleu_sentences": 0, "best_metric": "loss"}},
        {"decode": {"nbest": 4}, "evaluate": {"splits": "valid,test"}},
    ],
)
def test_compatible_options_are_accepted(values):
    flat = options.to_flat(from_config_dict(values))
    assert all(flat[f"{section}.{name}"] == value for section in values for name, value in values[section].items())


def test_config_is_frozen():
    config = Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model.width = 3  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train = config.train  # type: ignore[misc]


def test_difference_lists_the_changed_options():
    changes = {"model": {"width": 256, "remat": "full"}, "train": {"steps": 5}}
    old, new = Config(), from_config_dict(changes)
    assert options.difference(old, new, free=False) == ["model.width: 512 -> 256"]
    assert options.difference(old, new, free=True) == [
        "model.width: 512 -> 256",
        "model.remat: 'auto' -> 'full'",
        "train.steps: 100000 -> 5",
    ]
    assert options.difference(new, new, free=True) == []


@given(st.data())
def test_save_and_load_round_trip(tmp_path_factory, data):
    """Any option with any valid value is loaded with the same value and type."""
    name, field = data.draw(st.sampled_from(list(fields())))
    section, option = name.split(".")
    try:
        config = from_config_dict({section: {option: data.draw(valid_values(field))}})
    except UserError:
        reject()  # another option makes this value invalid
    path = tmp_path_factory.getbasetemp() / "config.json"
    path.write_text(options.to_json(config))
    loaded = options.load(path)
    assert loaded == config
    assert {n: type(v) for n, v in options.to_flat(loaded).items()} == {
        n: type(v) for n, v in options.to_flat(config).items()
    }


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff",
        b'{"model": 3}',
        b'{"model": {"widht": 3}}',
        b'{"model": [], "data": {}, "train": {}}',
    ],
)
def test_invalid_config_files_are_named(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_bytes(text)
    with pytest.raises(UserError) as raised:
        options.load(path)
    assert str(path) in str(raised.value)
    assert "restore the file" in str(raised.value)


def test_files_that_need_not_be_deleted_are_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "marian"}')
    with pytest.raises(UserError, match=r"config\.json: this is a model of Hugging Face, .* with --mode=import$"):
        options.load(tmp_path / "config.json")
    (tmp_path / "notes").write_text("not a config")
    with pytest.raises(UserError, match=r"notes: not the config\.json of a run .*; give --config="):
        options.load(tmp_path / "notes")
    with pytest.raises(UserError, match=r"none\.json: there is no such file, so .* is no run$"):
        options.load(tmp_path / "none.json")
    with pytest.raises(StorageError, match=r"Is a directory$"):
        options.load(tmp_path)


def test_saved_config_is_json_with_every_option(tmp_path):
    (tmp_path / "config.json").write_text(options.to_json(Config()))
    saved = json.loads((tmp_path / "config.json").read_text())
    del saved["checksum"]
    assert [f"{section}.{name}" for section in saved for name in saved[section]] == [n for n, _ in fields()]


def test_a_changed_value_in_a_saved_config_is_noticed(tmp_path):
    path, text = tmp_path / "config.json", options.to_json(Config())
    changes = (('"heads": 8', '"heads": 4'), ('"beam_size": 4', '"beam_size": 5'), ('"checksum": ', '"checksum": 1'))
    for old, new in changes:
        assert text.count(old) == 1
        path.write_text(text.replace(old, new))
        with pytest.raises(UserError, match="its checksum differs, so it was damaged or edited"):
            options.load(path)
    # Earlier versions saved no checksum.
    path.write_text(json.dumps({name: values for name, values in json.loads(text).items() if name != "checksum"}))
    assert options.load(path) == Config()


def test_help_lists_every_option_with_default_unit_and_meaning():
    lines = {words[0]: line for line in options.help_text().splitlines() if (words := line.split())}
    for name, field in fields():
        expected = [field.metadata["help"], field.metadata["unit"], *field.metadata["choices"]]
        expected += [] if field.default == "" else [str(field.default)]
        assert [part for part in expected if part not in lines[name]] == [], name


def test_help_begins_with_the_common_options_and_lists_each_option_once():
    groups = [group.splitlines() for group in options.help_text().split("\n\n")]
    names = [[line.split()[0] for line in lines] for _, *lines in groups]
    assert sorted(itertools.chain(*names)) == sorted(name for name, _ in fields())
    assert 15 <= len(names[0]) <= 25
    assert {"model.method", "data.path", "train.learning_rate", "decode.beam_size"} <= set(names[0])
    assert [head.partition(":")[0] for head, *_ in groups] == ["Common options", *sections(Config())]
    for (head, *_), group in zip(groups[1:], names[1:], strict=True):
        assert {name.split(".")[0] for name in group} == {head.partition(":")[0]}


def test_assigned_options_override_recommendations_even_at_the_default() -> None:
    recommended = {
        "train.learning_rate": 1e-3,
        "train.warmup_steps": 8000,
        "train.optimizer": "radam",
        "model.dropout": 0.5,
        "train.schedule": "noam",
    }
    config = default_config("2L-2L")
    config.train.learning_rate = 7e-4
    config.train["warmup_steps"] = TrainConfig().warmup_steps
    config.train.update({"optimizer": TrainConfig().optimizer})
    loaded = from_config_dict(with_recommended(copy.deepcopy(config), recommended))
    assert loaded == from_config_dict(with_recommended(config, recommended))
    assert (loaded.train.learning_rate, loaded.train.warmup_steps) == (7e-4, TrainConfig().warmup_steps)
    assert (loaded.train.optimizer, loaded.train.schedule) == (TrainConfig().optimizer, "noam")
    assert (loaded.model.dropout, loaded.model.encoder_layers) == (0.5, 2)


def test_alpha_steps_follow_the_warmup_unless_assigned() -> None:
    config = default_config()
    config.train.warmup_steps = 200
    assert from_config_dict(with_alpha_steps(copy.deepcopy(config), 18)).model.alpha_steps == 200
    config.model.alpha_steps = ModelConfig().alpha_steps
    assert from_config_dict(with_alpha_steps(config, 18)).model.alpha_steps == ModelConfig().alpha_steps
    without = default_config()
    without.train.warmup_steps = 0
    assert from_config_dict(with_alpha_steps(without, 18)).model.alpha_steps == ModelConfig().alpha_steps


@pytest.mark.parametrize(
    ("method", "depth", "power", "expected"),
    [
        ("branchnorm", "18L-18L", 2.0, 200),
        ("branchnorm", "144L-6L", 2.0, 400),  # 144 = 8 x 18
        ("branchnorm", "6L-144L", 1.0, 400),
        ("branchnorm", "144L-6L", 0.0, 200),  # as published
        ("prores_pre_ln", "144L-6L", 2.0, 200),
    ],
)
def test_alpha_grows_for_longer_in_deeper_stacks_of_branchnorm(
    method: str, depth: str, power: float, expected: int
) -> None:
    config = default_config(depth)
    config.model.method = method
    config.train.warmup_steps, config.train.branch_update_power = 200, power
    assert with_alpha_steps(config, METHODS[method].warmup_layers).model.alpha_steps == expected


def test_saved_options_count_as_assigned() -> None:
    """A resumed run keeps its options even if the recommendations have changed."""
    saved = ml_collections.ConfigDict(dataclasses.asdict(Config())).lock()
    assert assigned(saved) == {name for name, _ in fields()}
    assert from_config_dict(with_recommended(saved, {"train.schedule": "noam"})) == Config()


def test_every_recommendation_is_a_valid_option() -> None:
    for method, recipe in METHODS.items():
        config = default_config()
        config.model.method = method
        chosen = to_flat(from_config_dict(with_recommended(config, recipe.recommended)))
        assert {name: chosen[name] for name in recipe.recommended} == recipe.recommended
