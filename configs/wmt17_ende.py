r"""WMT17 English-German: Table 1 of the BranchNorm paper, tested on newstest2014.

    python main.py --config=configs/wmt17_ende.py:18L-18L --workdir=runs/wmt17 --config.data.tfds_dir=<folder>

The options are those of the paper's Table 4.

Prepare the text once (5.9 million pairs; a download of some gigabytes), with the same <folder>:

    python -c "import tensorflow_datasets as tfds, tensorflow_datasets.translate; \
        [tfds.builder(name + '_translate/de-en', data_dir='<folder>', file_format='array_record').download_and_prepare()
        for name in ('wmt17', 'wmt14')]"

The paper trains on 32 A100 with 524,288 tokens per update. On fewer devices --config.train.accumulation splits an
update, and --mode=plan predicts whether it fits. This config has not been trained here. The paper's BLEU (multi-bleu)
is 29.3 at 6L-6L, 30.3 at 18L-18L and 30.7 at 50L-50L.

The paper uses fairseq, so positions and Adam's epsilon are as in fairseq. (The Adam that fairseq uses if apex is
installed was not checked.) A model for Hugging Face needs --config.model.positions=marian. The paper stops early on
small sets but does not say when; this project chose a patience of 20 validations.

Differences from the paper, which uses fairseq's prepare-wmt14en2de.sh:

  - The script takes Europarl v7, Common Crawl and News Commentary v12; TFDS adds rapid_2016.
  - The script validates on every 100th training pair, this config on newstest2013.
  - The paper trains BranchNorm with plain updates; here the update of each layer is multiplied by alpha^2, and in deep
    stacks alpha grows more slowly and ends below 1 (see docs/depth.md). As published:
    --config.train.branch_update_power=0 --config.model.alpha_end=1.
  - The script tokenises with Moses and learns 40,000 BPE merges; here SentencePiece learns 40,000 BPE pieces.

To train on the script's own pairs, detokenise train, valid and test of its folder wmt14_en_de/tmp, and add
--config.data.source=text --config.data.path=<folder> --config.data.valid_split=valid --config.data.test_split=test
"""

import ml_collections

from branchnorm_jax.config import default_config, set_depth


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """Transformer base with the paper's options; where the paper has none, those of fairseq's WMT17 script."""
    config = default_config()
    config.model.dropout = 0.4
    config.model.positions = "fairseq"
    config.data.source = "tfds"
    config.data.path = "wmt17_translate/de-en"
    config.data.valid_split = "wmt14_translate/de-en:validation"  # newstest2013
    config.data.test_split = "wmt14_translate/de-en:test"  # newstest2014
    config.data.vocab_size = 40_000
    config.data.vocab_type = "bpe"
    config.data.max_length = 250
    config.data.max_ratio = 1.5
    config.data.row_multiple = 128
    config.train.batch_tokens = 128 * 4096
    config.train.accumulation = 16
    config.train.adam_eps_mode = "fairseq"
    config.train.patience = 20
    config.decode.beam_size = 4
    config.decode.length_penalty = 0.6
    set_depth(config, depth)
    return config
