"""Small random models in the formats of other toolkits, made with their own classes."""

import argparse
import itertools
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

SENTENCES = {
    "source": "the small dog sees a big house . my sister reads an old book in the garden . we see the ship",
    "target": "der kleine Hund sieht ein großes Haus . meine Schwester liest ein altes Buch im Garten . wir sehen",
}


SMALL: dict[str, Any] = dict(
    d_model=16, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=24, decoder_ffn_dim=24, init_std=0.3, max_position_embeddings=64,
)  # fmt: skip
"""Sizes of models of BART's family."""


def train_spm(path: Path, text: str, size: int, **options: Any) -> list[str]:
    """Trains a SentencePiece model with its own default ids; returns its pieces."""
    words = text.split()
    lines = [" ".join(words[start : start + 5]) for start in range(len(words))] * 4
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=file, vocab_size=size, minloglevel=2, **options
        )
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return [processor.id_to_piece(index) for index in range(processor.get_piece_size())]


def marian(
    folder: Path,
    *,
    tags: Iterable[str] = (),
    apart: bool = False,
    safe: bool = True,
    missing: Collection[str] = (),
    model_type: str = "unigram",
    **options: Any,
) -> dict[str, int]:
    """Writes a random MarianMTModel as OPUS-MT's models are stored; returns its source vocabulary."""
    import torch
    from transformers import MarianConfig, MarianMTModel

    folder.mkdir(exist_ok=True)
    sides = {
        side: train_spm(folder / f"{side}.spm", text, 36, model_type=model_type) for side, text in SENTENCES.items()
    }
    # As there: EOS and UNK first, PAD last, the pieces of both sides in one vocabulary, but not all of them.
    both = [*tags, *sides["source"], *sides["target"]]
    listed = dict(sides) if apart else {"source": both, "target": both}
    vocabularies = []
    for pieces in listed.values():
        unique = dict.fromkeys(piece for piece in pieces if piece not in ("<unk>", "<s>", "</s>", *missing))
        vocabularies.append({piece: index for index, piece in enumerate(["</s>", "<unk>", *unique, "<pad>"])})
    source, target = vocabularies
    for name, ids in zip(("vocab.json", "target_vocab.json")[: 1 + apart], vocabularies, strict=False):
        (folder / name).write_text(json.dumps(ids, ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"source_lang": "en", "target_lang": "de", "separate_vocabs": apart, "model_max_length": 512})
    )
    torch.manual_seed(0)
    settings: dict[str, Any] = dict(
        vocab_size=len(source),
        decoder_vocab_size=len(target),
        share_encoder_decoder_embeddings=not apart,
        **SMALL,
        activation_function="swish",
        scale_embedding=True,
        pad_token_id=source["<pad>"],
        decoder_start_token_id=target["<pad>"],
        eos_token_id=0,
        forced_eos_token_id=0,
        num_beams=4,
    )
    model = MarianMTModel(MarianConfig(**settings | options)).eval()
    with torch.no_grad():
        model.final_logits_bias.normal_()
        model.final_logits_bias[0, 0] = 2.5  # some translations end before their limit
        for name, parameter in model.named_parameters():
            if "layer_norm" in name or name.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
    if safe:
        model.save_pretrained(folder)
    else:
        model.config.save_pretrained(folder)
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return source


def m2m100(folder: Path, *, nllb: bool = False, safe: bool = True, **options: Any) -> None:
    """Writes a random M2M100 model as those of M2M-100 or NLLB are stored."""
    import torch
    from transformers import M2M100Config, M2M100ForConditionalGeneration, NllbTokenizer

    folder.mkdir(exist_ok=True)
    pieces = train_spm(folder / "sentencepiece.bpe.model", " . ".join(SENTENCES.values()), 60, model_type="bpe")
    if nllb:
        # The class adds no languages to a SentencePiece model, so they come after <mask> here.
        tokenizer = NllbTokenizer.from_pretrained(folder, extra_special_tokens=["eng_Latn", "deu_Latn", "fra_Latn"])
        tokenizer.save_pretrained(folder)
        size = len(tokenizer)
    else:
        # As there: the order of vocab.json is another one than that of the SentencePiece model.
        ids = {piece: index for index, piece in enumerate(["<s>", "<pad>", "</s>", "<unk>", *pieces[:2:-1]])}
        (folder / "vocab.json").write_text(json.dumps(ids), encoding="utf-8")
        size = len(ids) + 100
    settings: dict[str, Any] = dict(
        vocab_size=size + 8,
        **SMALL,
    )
    torch.manual_seed(0)
    save(M2M100ForConditionalGeneration(M2M100Config(**settings | options)), folder, safe, 2.5 if nllb else 4.5)


def mbart50(folder: Path, *, safe: bool = True, **options: Any) -> None:
    """Writes a random MBart model as those of mBART-50 are stored: without tokenizer.json and a list of languages."""
    import torch
    from transformers import MBart50Tokenizer, MBartConfig, MBartForConditionalGeneration

    folder.mkdir(exist_ok=True)
    train_spm(folder / "sentencepiece.bpe.model", " . ".join(SENTENCES.values()), 60)
    settings: dict[str, Any] = dict(
        vocab_size=len(MBart50Tokenizer.from_pretrained(folder)),
        **SMALL,
        scale_embedding=True,
        decoder_start_token_id=2,
    )
    torch.manual_seed(0)
    save(MBartForConditionalGeneration(MBartConfig(**settings | options)), folder, safe, 0.0)


def save(model: Any, folder: Path, safe: bool = True, raised: float = 2.5) -> None:
    """Gives norms and biases random values, and writes the model to one file of either kind.

    The logit of EOS is raised by about `raised`, so that some translations end before their limit.
    """
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
        eos = model.model.shared.weight[model.config.eos_token_id]
        model.model.decoder.layer_norm.bias.add_(raised * eos / (eos @ eos))
    if safe:
        model.save_pretrained(folder)
    else:
        model.config.save_pretrained(folder)
        torch.save(model.state_dict(), folder / "pytorch_model.bin")


def marian_npz(folder: Path, *, joint: bool = False, pre_norm: bool = False, tables: str = "all") -> Any:
    """Writes a random model under Marian's own names; returns the same model as a module of PyTorch.

    Args:
      folder: the folder.
      joint: one SentencePiece model for both sides, trained with Marian's ids, instead of lists of pieces.
      pre_norm: the norms come before the branches; the returned model is then another one.
      tables: which embedding tables are shared: all, decoder or none. Unless all, the returned model is another one.
    """
    import torch
    from transformers import MarianMTModel

    ids = marian(folder / "huggingface", init_std=0.4)
    model = MarianMTModel.from_pretrained(folder / "huggingface").eval()
    count = len(ids) - 1  # <pad> is the last one
    width, length = model.config.d_model, 64
    angles = np.arange(length)[:, None] / 10000 ** (np.arange(width // 2) / (width // 2 - 1))
    with torch.no_grad():
        model.final_logits_bias[0, -1] = -1e9
        for stack in (model.model.encoder, model.model.decoder):
            stack.embed_positions.weight[:] = torch.tensor(np.concatenate([np.sin(angles), np.cos(angles)], 1))
    if joint:
        count = 48
        options: dict[str, Any] = dict(eos_id=0, unk_id=1, bos_id=-1)
        train_spm(folder / "vocab.spm", " . ".join(SENTENCES.values()), count, **options)
        vocabularies = ["vocab.spm", "vocab.spm"]
    else:
        for side in SENTENCES:
            (folder / f"{side}.spm").write_bytes((folder / "huggingface" / f"{side}.spm").read_bytes())
        listed = "".join(f"{json.dumps(piece, ensure_ascii=False)}: {ids[piece]}\n" for piece in list(ids)[:-1])
        (folder / "both.vocab.yml").write_text(listed, encoding="utf-8")
        vocabularies = ["both.vocab.yml", "both.vocab.yml"]
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    arrays = {
        "Wemb": state["model.shared.weight"][:count],
        "decoder_ff_logit_out_b": state["final_logits_bias"][:, :count],
    }
    blocks = {"self_attn": "self", "encoder_attn": "context"}
    norms = {"self_attn": "self_Wo", "encoder_attn": "context_Wo", "final": "ffn_ffn"}
    for name, array in state.items():
        if not (match := re.fullmatch(r"model\.(\w+)\.layers\.(\d+)\.(.+)\.(weight|bias)", name)):
            continue
        stack, layer, part, kind = match.groups()
        start = f"{stack}_l{int(layer) + 1}_"
        if part.endswith("layer_norm"):
            theirs = norms[part.removesuffix("_layer_norm")] + ("_ln_scale" if kind == "weight" else "_ln_bias")
        elif part in ("fc1", "fc2"):
            theirs = f"ffn_{'W' if kind == 'weight' else 'b'}{part[-1]}"
        else:
            block, matrix = part.split(".")
            theirs = f"{blocks[block]}_{'W' if kind == 'weight' else 'b'}{matrix[0]}"
        arrays[start + theirs] = array.T if array.ndim == 2 else array[None]
    draw = np.random.default_rng(0).normal
    if pre_norm:
        arrays = {f"{name}_pre" if "_ln_" in name else name: array for name, array in arrays.items()}
        for stack, leaf in itertools.product(("encoder", "decoder"), ("scale", "bias")):
            arrays[f"{stack}_top_ln_{leaf}"] = draw(size=(1, width)).astype(np.float32)
    if tables != "all":
        arrays["encoder_Wemb"] = draw(size=(count, width)).astype(np.float32)
        arrays["decoder_Wemb"] = arrays.pop("Wemb")
    if tables == "none":
        arrays["decoder_ff_logit_out_W"] = draw(size=(width, count)).astype(np.float32)
    options = {
        "type": "transformer", "enc-depth": 2, "dec-depth": 3, "dim-emb": width, "transformer-dim-ffn": 24,
        "transformer-heads": 4, "transformer-ffn-activation": "swish", "transformer-decoder-autoreg": "self-attention",
        "transformer-preprocess": "n" if pre_norm else "", "transformer-postprocess": "da" if pre_norm else "dan",
        "transformer-postprocess-top": "n" if pre_norm else "", "transformer-postprocess-emb": "d",
        "transformer-no-projection": False, "transformer-guided-alignment-layer": "last",
        "tied-embeddings-all": tables == "all", "tied-embeddings": tables == "decoder", "dim-vocabs": [count, count],
    }  # fmt: skip
    text = "".join(f"{name}: {json.dumps(value)}\n" for name, value in options.items())
    arrays["special:model.yml"] = np.frombuffer(text.encode() + b"\0", np.int8)
    np.savez(folder / "model.npz", **arrays)
    (folder / "decoder.yml").write_text(
        f"models:\n  - model.npz\nvocabs: {json.dumps(vocabularies)}\nbeam-size: 6\nnormalize: 1\n"
    )
    return model


def learned_codes(text: str, count: int) -> list[str]:
    """Returns the first merges of the text's words, most frequent pair first."""
    words = [f"{' '.join(word)}</w>" for word in text.split()]
    merges = []
    for _ in range(count):
        pairs: Counter[Any] = Counter(pair for word in words for pair in itertools.pairwise(word.split(" ")))
        best = " ".join(max(pairs, key=lambda pair: (pairs[pair], pair)))
        merges.append(best)
        words = [re.sub(rf"(?<!\S){re.escape(best)}(?!\S)", best.replace(" ", ""), word) for word in words]
    return merges


def write_codes(folder: Path, texts: Mapping[str, str], kind: str) -> dict[str, list[str]]:
    """Writes codes for all texts in the format of a program; returns the pieces of each text."""
    merges = learned_codes(" ".join(texts.values()), 40)
    header, count = ("", " 7") if kind == "fastBPE" else ("#version: 0.2\n", "")
    (folder / "bpecodes").write_text(header + "".join(f"{merge}{count}\n" for merge in merges), encoding="utf-8")
    made = [merge.replace(" ", "") for merge in merges]
    characters = [
        each for character in "abcdefghijklmnoprstuvwxyzäöüß.,;&-@H0123" for each in (character, f"{character}</w>")
    ]
    pieces = dict.fromkeys([*made, *characters, "@-@</w>", "&apos;s</w>", "&quot;</w>"])
    return {
        lang: [piece.removesuffix("</w>") if piece.endswith("</w>") else f"{piece}@@" for piece in pieces]
        for lang in texts
    }


def fsmt_tokenizer(folder: Path, lang: str) -> Any:
    """Returns the tokenizer of `transformers` for codes of fastBPE, for one side of a folder that `fairseq` wrote."""
    from transformers import FSMTTokenizer

    class Plain(FSMTTokenizer):
        def moses_pipeline(self, text: str, lang: str) -> str:
            """Leaves out the normalisation of the text, as fairseq does."""
            return text

    lines = (folder / f"dict.{lang}.txt").read_text(encoding="utf-8").splitlines()
    listed = [line.rsplit(" ", 1)[0] for line in lines]
    words = [piece.removesuffix("@@") if piece.endswith("@@") else f"{piece}</w>" for piece in listed]
    ids = {piece: index for index, piece in enumerate(["<s>", "<pad>", "</s>", "<unk>", *words])}
    path = folder / f"{lang}.json"
    path.write_text(json.dumps(ids), encoding="utf-8")
    return Plain(langs=[lang, lang], src_vocab_file=path, tgt_vocab_file=path, merges_file=folder / "bpecodes")


def fairseq(
    folder: Path, *, pre_norm: bool = False, apart: bool = False, hydra: bool = False, codes: str = "", **options: Any
) -> Any:
    """Writes a random model under fairseq's names; returns the same model as a module of PyTorch.

    The classes of `transformers` are ports of fairseq's: FSMT of its Post-LN Transformer, and M2M100 of the Pre-LN one.

    Args:
      folder: the folder.
      pre_norm: the norms come before the branches.
      apart: two vocabularies, without shared tables; only with Post-LN.
      hydra: the options are where fairseq has them since version 0.10.
      codes: the text is split by codes of this program, fastBPE or subword-nmt, and not by SentencePiece.
      options: further options of fairseq, which change nothing in the returned model.
    """
    import torch
    from transformers import FSMTConfig, FSMTForConditionalGeneration, M2M100Config, M2M100ForConditionalGeneration

    folder.mkdir(exist_ok=True)
    texts = dict(zip(("en", "de"), SENTENCES.values(), strict=True))
    texts = texts if apart else dict.fromkeys(texts, " . ".join(texts.values()))
    sizes = {}
    split = write_codes(folder, texts, codes) if codes else {}
    for lang, text in texts.items():
        pieces = split.get(lang) or train_spm(folder / (f"spm.{lang}.model" if apart else "spm.model"), text, 36)[:2:-1]
        listed = [f"{piece} {1000 - index}" for index, piece in enumerate(pieces)]
        fill = -(len(listed) + 4) % 8
        listed += [f"madeupword{index:04} 0" for index in range(fill)]
        (folder / f"dict.{lang}.txt").write_text("\n".join(listed) + "\n", encoding="utf-8")
        sizes[lang] = len(listed) + 4
    both: dict[str, Any] = dict(**SMALL, scale_embedding=True)
    torch.manual_seed(0)
    if pre_norm:
        model: Any = M2M100ForConditionalGeneration(M2M100Config(vocab_size=sizes["en"], **both))
    else:
        langs: dict[str, Any] = dict(langs=["en", "de"], src_vocab_size=sizes["en"], tgt_vocab_size=sizes["de"])
        model = FSMTForConditionalGeneration(FSMTConfig(tie_word_embeddings=False, **langs, **both))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
        if not (pre_norm or apart):
            model.model.decoder.embed_tokens.weight[:] = model.model.encoder.embed_tokens.weight
            model.model.decoder.output_projection.weight[:] = model.model.encoder.embed_tokens.weight
    state = {
        name.removeprefix("model."): tensor.clone()
        for name, tensor in model.state_dict().items()
        if "embed_positions" not in name and "shared" not in name and "lm_head" not in name
    }
    if pre_norm:
        table = model.model.shared.weight.detach().clone()
        names = "encoder.embed_tokens", "decoder.embed_tokens", "decoder.output_projection"
        state |= {f"{name}.weight": table for name in names}
    for stack in ("encoder", "decoder"):
        state |= {f"{stack}.version": torch.tensor([3.0]), f"{stack}.embed_positions._float_tensor": torch.zeros(1)}
    network = dict(
        encoder_embed_dim=16, encoder_ffn_embed_dim=24, encoder_layers=2, encoder_attention_heads=4,
        decoder_embed_dim=16, decoder_ffn_embed_dim=24, decoder_layers=3, decoder_attention_heads=4,
        encoder_normalize_before=pre_norm, decoder_normalize_before=pre_norm, encoder_learned_pos=False,
        decoder_learned_pos=False, activation_fn="relu", dropout=0.3, share_all_embeddings=not apart,
        share_decoder_input_output_embed=False, adaptive_softmax_cutoff=None, no_token_positional_embeddings=False,
        max_source_positions=64, max_target_positions=64,
    ) | options  # fmt: skip
    task = dict(source_lang="en", target_lang="de")
    made: dict[str, Any] = {"args": argparse.Namespace(**task, **network)}
    if hydra:
        made = {"args": None, "cfg": {"model": argparse.Namespace(**network), "task": task}}
    record = {"extra_state": {"val_loss": np.float64(3.5), "epoch": 4}, "last_optimizer_state": None}
    torch.save({"model": state, **made, **record}, folder / "checkpoint_best.pt")
    return model.eval()


def t5(
    folder: Path, *, old: bool = False, apart: bool = True, safe: bool = True, kind: str = "t5", **options: Any
) -> Any:
    """Writes a random model of the T5 family; returns it.

    Args:
      folder: the folder.
      old: config.json has the options of older versions of `transformers`.
      apart: the output has a table of its own, as in T5 v1.1 and mT5.
      safe: the weights are in safetensors, not in a file of PyTorch.
      kind: model_type.
      options: of its configuration.
    """
    import torch
    import transformers

    folder.mkdir(exist_ok=True)
    special: dict[str, Any] = dict(pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    text = " . ".join(SENTENCES.values()) + " translate English to German : "
    pieces = train_spm(folder / "spiece.model", text, 60, **special, user_defined_symbols=["<2de>", "<2fr>"])
    tokenizer = {"tokenizer_class": "T5Tokenizer", "extra_ids": 5}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    torch.manual_seed(0)
    settings: dict[str, Any] = dict(
        vocab_size=len(pieces) + 8,
        d_model=16,
        d_kv=6,
        d_ff=24,
        num_layers=2,
        num_decoder_layers=3,
        num_heads=4,
        feed_forward_proj="gated-gelu" if apart else "relu",
        tie_word_embeddings=not apart,
        decoder_start_token_id=0,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=20,
        initializer_factor=1.0,
    )
    names = {"t5": ("T5Config", "T5ForConditionalGeneration"), "mt5": ("MT5Config", "MT5ForConditionalGeneration")}
    make_config, make_model = (getattr(transformers, name) for name in names[kind])
    model = make_model(make_config(**settings | options)).eval()
    if apart:
        model.lm_head.weight = torch.nn.Parameter(0.3 * torch.randn(model.lm_head.weight.shape))
        model.lm_head.weight.data[1] *= 2  # some translations end before their limit
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layer_norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            if "relative_attention_bias" in name:
                parameter.normal_()
    if safe:
        model.save_pretrained(folder)
    else:
        model.config.save_pretrained(folder)
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    if old:
        path = folder / "config.json"
        values = json.loads(path.read_text()) | {"tie_word_embeddings": not apart}
        values.pop("scale_decoder_outputs", None)
        path.write_text(json.dumps(values))
    return model
