"""Marian's own models: a folder with one .npz file, its vocabularies and, as a rule, decoder.yml.

The names of the weights and the options in the file (`special:model.yml`) are Marian's. Matrices are [d_in, d_out]. The
decoder starts from a vector of zeros, and the frequencies of the positions are those of Tensor2Tensor. Marian's norms
have an epsilon of 1e-6, ours 1e-5, as in Hugging Face's copy of Marian.
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import yaml

from branchnorm_jax.data.tokenizer import TAG
from branchnorm_jax.errors import UserError
from branchnorm_jax.export.fold import SUBLAYERS, UNUSED_BIAS
from branchnorm_jax.importing.imported import Imported, Side
from branchnorm_jax.importing.pieces import ids_of, ordered, parse, with_pieces
from branchnorm_jax.importing.tensors import Tensors
from branchnorm_jax.options import DecodeConfig, ModelConfig

OPTIONS = "special:model.yml"

SUPPORTED: dict[str, tuple[Any, ...]] = {
    "type": ("transformer",),
    "transformer-decoder-autoreg": ("self-attention",),
    "transformer-postprocess-emb": ("d", ""),
    "transformer-ffn-activation": ("relu", "swish"),
    "transformer-ffn-depth": (2,),
    "transformer-no-projection": (False,),
    "transformer-train-positions": (False,),
    "transformer-tied-layers": ([],),
    "transformer-aan-depth": (2,),
    "lemma-dim-emb": (0,),
}
"""Marian's options -> the values that this project supports. Options that are missing have the first value."""

METHODS = {("", "dan", ""): "post_ln", ("n", "da", "n"): "pre_ln"}
"""(transformer-preprocess, transformer-postprocess, transformer-postprocess-top) -> `model.method`."""

SPECIAL = ("<pad>", "</s>", "<unk>")
"""Marian has no piece for padding; it gets a row of its own."""

BLOCKS = {"self": ("self", "self_Wo"), "cross": ("context", "context_Wo"), "ffn": ("ffn", "ffn_ffn")}
"""Sub-layer -> beginning of the names of its matrices, and of its norm."""


def read_folder(folder: Path) -> Imported:
    """Reads a folder with Marian's model, vocabularies and decoder.yml.

    Vocabularies are SentencePiece models (.spm), or lists of pieces (.yml) with source.spm and target.spm.

    Raises:
      UserError: if a file is missing or damaged, or if the model has something that this project has not.
    """
    decoder = _yaml(folder / "decoder.yml") if (folder / "decoder.yml").exists() else {}
    path = _model_path(folder, decoder)
    arrays = _arrays(path)
    options = _options(path, arrays)
    source, target = _vocabularies(folder, decoder)
    weights = Tensors(path, arrays)
    tied = "all" if options.get("tied-embeddings-all") else "decoder" if options.get("tied-embeddings") else "none"
    key = tuple(options.get(f"transformer-{name}", "") for name in ("preprocess", "postprocess", "postprocess-top"))
    if key not in METHODS:
        raise UserError(f"{path}: --transformer-preprocess, -postprocess and -postprocess-top {key} are not supported")
    model = ModelConfig(
        method=METHODS[key],
        encoder_layers=options["enc-depth"],
        decoder_layers=options["dec-depth"],
        width=options["dim-emb"],
        ffn_width=options["transformer-dim-ffn"],
        heads=options["transformer-heads"],
        activation=options["transformer-ffn-activation"],
        shared_embeddings=tied,
        positions="tensor2tensor",
        decoder_start="zero",
        output_bias=True,
    )
    params: dict[str, Any] = {stack: _stack(weights, stack, model) for stack in SUBLAYERS}
    if model.method == "pre_ln":
        params |= {f"{stack}_norm": _norm(weights, f"{stack}_top", "", model.width) for stack in SUBLAYERS}
    params["embedding"] = _embedding(weights, model, options["dim-vocabs"], source, target)
    weights.finish()
    languages = [match[1] for match in map(TAG.fullmatch, source.pieces) if match]
    return Imported(
        model=model,
        decode=DecodeConfig(
            beam_size=int(decoder.get("beam-size", 12)), length_penalty=float(decoder.get("normalize", 0.0))
        ),
        source_lang="",
        target_langs=tuple(languages),
        params=params,
        source=source,
        target=target,
    )


def _model_path(folder: Path, decoder: dict[str, Any]) -> Path:
    """Returns the path of the model: the first one of decoder.yml, or the only .npz file of the folder."""
    named = decoder.get("models") or []
    found = [folder / Path(str(named[0])).name] if named else sorted(folder.glob("*.npz"))
    if len(found) != 1 or not found[0].is_file():
        raise UserError(f"{folder}: expected one .npz file, or the name of one in decoder.yml, not {len(found)}")
    return found[0]


def _arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path}: cannot be read ({str(error).splitlines()[0]})") from error


def _options(path: Path, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Takes the options out of the arrays, and checks them."""
    if OPTIONS not in arrays:
        raise UserError(f"{path}: it has no {OPTIONS}, so it is not a model of Marian")
    options = yaml.safe_load(arrays.pop(OPTIONS).tobytes().rstrip(b"\0").decode("utf-8"))
    for name, supported in SUPPORTED.items():
        if options.get(name, supported[0]) not in supported:
            raise UserError(f"{path}: --{name}={options[name]} is not supported, only {', '.join(map(str, supported))}")
    if missing := {"enc-depth", "dec-depth", "dim-emb", "transformer-dim-ffn", "transformer-heads"} - options.keys():
        raise UserError(f"{path}: {OPTIONS} has no {', '.join(sorted(missing))}")
    options.setdefault("transformer-ffn-activation", "swish")
    return options


def _yaml(path: Path) -> dict[str, Any]:
    try:
        return yaml.load(
            path.read_text(encoding="utf-8"), yaml.CBaseLoader if hasattr(yaml, "CBaseLoader") else yaml.BaseLoader
        )
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({' '.join(str(error).split())[:160]})") from error


def _vocabularies(folder: Path, decoder: dict[str, Any]) -> tuple[Side, Side]:
    """Reads the vocabularies of source and target; one for both sides if the files are the same."""
    names = [Path(str(name)).name for name in decoder.get("vocabs") or []]
    names = names or sorted(path.name for kind in ("*.spm", "*vocab*.yml") for path in folder.glob(kind))
    if not names:
        raise UserError(f"{folder}: expected vocabularies (.spm or .yml), best named in decoder.yml")
    lists = [name for name in names if name.endswith((".yml", ".yaml"))]
    used = lists or names
    paths = [folder / used[0], folder / used[-1]]
    spm_paths = [folder / "source.spm", folder / "target.spm"] if lists else paths
    if missing := [path for path in (*paths, *spm_paths) if not path.is_file()]:
        why = "; lists of pieces need the SentencePiece models source.spm and target.spm" if lists else ""
        raise UserError(f"{missing[0]}: this file is missing{why}")
    models = [parse(path) for path in spm_paths]
    ids = [
        {piece: int(number) for piece, number in _yaml(path).items()} if lists else ids_of(model)
        for path, model in zip(paths, models, strict=True)
    ]
    shared = ids[0] == ids[1]
    sides = []
    for index, (path, model) in enumerate(zip(paths, models, strict=True)):
        if absent := [piece for piece in SPECIAL[1:] if piece not in ids[index]]:
            raise UserError(f"{path}: the special pieces {', '.join(absent)} are missing")
        pieces = ordered(ids[index], SPECIAL, models if shared else [model])
        # As in `marian.py`: target pieces without an id must not occur in training.
        never = [piece for piece in pieces if piece not in ids[index]] if index else ()
        spm = with_pieces(model, pieces, never)
        sides.append(Side(spm, pieces, [ids[index].get(piece, -1) for piece in pieces]))
    return sides[0], sides[1]


def _embedding(
    weights: Tensors, model: ModelConfig, sizes: list[int], source: Side, target: Side
) -> dict[str, np.ndarray]:
    """Returns the embedding tables and the bias of the logits, in our order of pieces."""
    width = model.width
    bias = weights.take("decoder_ff_logit_out_b", 1, sizes[-1])[0][target.rows]
    bias[target.unused] = UNUSED_BIAS
    if model.shared_embeddings == "all":
        return {"shared": weights.take("Wemb", sizes[0], width)[source.rows], "bias": bias}
    common = weights.take("Wemb", sizes[0], width) if "Wemb" in weights else None
    tables = {}
    for name, side, size in (("source", source, sizes[0]), ("target", target, sizes[-1])):
        stack = "encoder" if name == "source" else "decoder"
        tables[name] = (weights.take(f"{stack}_Wemb", size, width) if common is None else common)[side.rows]
    if model.shared_embeddings == "none":
        turned = "decoder_ff_logit_out_Wt" in weights
        shape = (sizes[-1], width) if turned else (width, sizes[-1])
        output = weights.take("decoder_ff_logit_out_Wt" if turned else "decoder_ff_logit_out_W", *shape)
        tables["output"] = (output if turned else output.T)[target.rows]
    return tables | {"bias": bias}


def _stack(weights: Tensors, stack: str, model: ModelConfig) -> dict[str, Any]:
    """Returns the parameters of the layers of a stack, [L, ...] each."""
    width, hidden = model.width, model.ffn_width
    kind, suffix = ("pre", "_pre") if model.method == "pre_ln" else ("post", "")

    def layer(number: int) -> dict[str, Any]:
        params: dict[str, Any] = {}
        for sublayer in SUBLAYERS[stack]:
            block, norm = (f"{stack}_l{number}_{name}" for name in BLOCKS[sublayer])
            shapes = (
                {"1": (width, hidden), "2": (hidden, width)}
                if sublayer == "ffn"
                else dict.fromkeys("qkvo", (width,) * 2)
            )
            params[sublayer] = {
                f"fc{name}" if sublayer == "ffn" else name: {
                    "kernel": weights.take(f"{block}_W{name}", *shape),
                    "bias": weights.take(f"{block}_b{name}", 1, shape[1])[0],
                }
                for name, shape in shapes.items()
            }
            params[f"{sublayer}_{kind}_norm"] = _norm(weights, norm, suffix, width)
        return params

    layers = [layer(1 + index) for index in range(getattr(model, f"{stack}_layers"))]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *layers)


def _norm(weights: Tensors, name: str, suffix: str, width: int) -> dict[str, np.ndarray]:
    ours = {"scale": "ln_scale", "bias": "ln_bias"}
    return {leaf: weights.take(f"{name}_{theirs}{suffix}", 1, width)[0] for leaf, theirs in ours.items()}
