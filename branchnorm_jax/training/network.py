"""Creation of the network of a run from its config and its vocabulary."""

from branchnorm_jax.data.tokenizer import Tokenizer
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import ModelConfig


def make_model(config: ModelConfig, tokenizer: Tokenizer) -> Transformer:
    """Creates the network with the options of a config and the sizes of a vocabulary."""
    unused = {*tokenizer.absent_target, *(tokenizer.unused_target if config.mask_unused else ())}
    sizes = tokenizer.source_size, tokenizer.target_size
    return Transformer(config, *sizes, tuple(sorted(unused)), len(tokenizer.languages))
