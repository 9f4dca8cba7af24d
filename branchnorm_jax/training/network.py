"""The network of a run: a config's options and the sizes of a vocabulary."""

from branchnorm_jax.data.tokenizer import Tokenizer
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import ModelConfig


def make_model(config: ModelConfig, tokenizer: Tokenizer) -> Transformer:
    """Creates the network of a config for a vocabulary."""
    unused = tokenizer.unused_target if config.mask_unused else ()
    return Transformer(config, tokenizer.source_size, tokenizer.target_size, unused, len(tokenizer.languages))
