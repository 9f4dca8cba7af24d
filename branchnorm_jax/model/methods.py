"""Every method as data. To add one, add a row to `METHODS`: nothing else knows methods by name.

N and M are the layers of encoder and decoder, l counts the layers of a stack from 1, D is the model width. Names with a
suffix are variants of the method before them: ablations, or official code that differs from its paper.
"""

import difflib
import re
from dataclasses import replace

from branchnorm_jax.errors import UserError
from branchnorm_jax.model import depth_rules as by
from branchnorm_jax.model.recipe import EVERYWHERE, ONE, ZERO, Recipe, Rule, Weight, always, scaled
from branchnorm_jax.options import ModelConfig

BRANCH_MATRICES = ("v", "o", "fc1", "fc2")
ALL_MATRICES = ("q", "k", "v", "o", "fc1", "fc2")
DEEPNORM_GAIN = dict.fromkeys(BRANCH_MATRICES, by.deepnorm_beta)
FAIRSEQ_NOTE = (
    "The official code has the initialisation of newer fairseq (model.init=fairseq: feed-forward matrices, and the "
    "biases of q, k, v, fc1 and fc2, as in PyTorch's Linear). This method has that of older fairseq, like most here."
)

METHODS: dict[str, Recipe] = {}


def _depth_scaled(power: float) -> dict[str, Rule]:
    """Returns DS-Init's gains, l^power, for the base that draws q, k and v as one [D, 3D] matrix.

    The official code fuses q, k and v in self-attention only. For cross-attention it draws three [D, D] matrices, which
    are sqrt(2) times as large.
    """
    rule = by.layer_power(power)
    return dict.fromkeys(ALL_MATRICES, rule) | dict.fromkeys(("cross/q", "cross/k", "cross/v"), scaled(rule, 2**0.5))


METHODS["post_ln"] = POST_LN = Recipe(
    equation="x' = LN(x + F(x))",
    citation="Attention Is All You Need (Vaswani et al., 2017)",
    arxiv="1706.03762",
    post=True,
)
METHODS["pre_ln"] = PRE_LN = Recipe(
    equation="x' = x + F(LN(x))",
    citation="Learning Deep Transformer Models for Machine Translation (Wang et al., 2019)",
    arxiv="1906.01787",
    pre=True,
    final="norm",
)
METHODS["gpt2norm"] = Recipe(
    equation="x' = x + LN(F(x))",
    citation="ReZero is All You Need (Bachlechner et al., 2020), which compares with it",
    arxiv="2003.04887",
    note="The copies of the paper that we could read lack the formula. This is the more likely of two readings; "
    "sandwich is the other. GPT-2 itself is Pre-LN.",
    branch_norm=EVERYWHERE,
    final="norm",
)
METHODS["sandwich"] = SANDWICH = Recipe(
    equation="x' = x + LN(F(LN(x)))",
    citation="CogView (Ding et al., 2021)",
    arxiv="2105.13290",
    pre=True,
    branch_norm=EVERYWHERE,
    final="norm",
)
METHODS["peri_ln"] = replace(
    SANDWICH,
    equation="x' = x + LN(F(LN(x))), LN of the embeddings",
    citation="Peri-LN (Kim et al., 2025)",
    arxiv="2502.02732",
    embedding_norm=True,
)
METHODS["deepnorm"] = DEEPNORM = Recipe(
    equation="x' = LN(a x + F(x)), a from the depth",
    citation="DeepNet: Scaling Transformers to 1,000 Layers (Wang et al., 2022)",
    arxiv="2203.00555",
    post=True,
    skip=Weight(by.deepnorm_alpha),
    init="xavier_normal",
    gain=DEEPNORM_GAIN,
)
METHODS["deepnorm_torchscale"] = replace(
    DEEPNORM,
    note="The initialisation of the official code: encoder gain 1.15 (N^4 M)^(-1/16), on PyTorch's default "
    "distribution and on biases.",
    init="torch",
    gain=dict.fromkeys(BRANCH_MATRICES, by.torchscale_beta),
)
METHODS["branchnorm"] = BRANCHNORM = Recipe(
    equation="x' = LN(x + alpha_t F(x)), alpha_t = min(1, t/T)",
    citation="BranchNorm: Robustly Scaling Extremely Deep Transformers (Liu et al., 2023)",
    arxiv="2305.02790",
    note="model.alpha_schedule determines how alpha grows until update T = model.alpha_steps. The paper does not scale "
    "updates, T is the warm-up, and alpha ends at 1 at every depth; with Adam the encoder then collapses (see "
    "docs/results.md).",
    post=True,
    branch=Weight(ZERO, end=ONE),
    init="xavier_normal",
    gain=DEEPNORM_GAIN,
    warmup_layers=18,
    # 7/cbrt(n), capped at 1, is 1 up to 114 layers. With an end of 1, the loss of 500L-500L jumps; see docs/depth.md.
    recommended={"train.branch_update_power": 2.0, "model.alpha_end": "7/cbrt(n)"},
)
METHODS["mixnorm"] = replace(
    BRANCHNORM,
    equation="x' = LN(a x + alpha_t F(x)), a from the depth",
    note="The paper's tables have this method, but no formula. Our interpretation: DeepNorm's skip weight with "
    "BranchNorm's growing branch. After the growth it equals DeepNorm.",
    skip=Weight(by.deepnorm_alpha),
    warmup_layers=0,
    recommended={},
)
METHODS["mixnorm_anneal"] = replace(
    BRANCHNORM,
    equation="x' = LN(a_t x + alpha_t F(x)), a_t from DeepNorm's a to 1",
    note="Another interpretation of mixnorm: the skip weight shrinks while the branch grows. After the growth it "
    "equals Post-LN.",
    skip=Weight(by.deepnorm_alpha, end=ONE),
    warmup_layers=0,
    recommended={},
)
METHODS["rezero"] = REZERO = Recipe(
    equation="x' = x + r F(x), r learned from 0, one per layer",
    citation="ReZero is All You Need (Bachlechner et al., 2020)",
    arxiv="2003.04887",
    note="The paper's appendix A trains language models with LAMB at a constant learning rate, without warm-up. "
    "The copies of the paper that could be read lack the rate. A secondary source gives 0.016 for 1080 sequences "
    "of 512 characters, which fits 0.0005 sqrt(sequences per batch). The rate for translation is unknown, so none "
    "is recommended: set train.learning_rate. The paper does not state the initial distribution; the authors' "
    "notebook (ReZero-examples) draws every matrix Xavier uniform and trains with Adagrad.",
    branch=Weight(ZERO, learned="layer"),
    recommended={"train.optimizer": "lamb", "train.schedule": "constant", "train.warmup_steps": 0},
)
METHODS["rezero_one"] = replace(
    REZERO,
    equation="x' = x + r F(x), r learned from 1",
    note="The paper's ablation (section 5.2) of r's initial value; the options are those of rezero.",
    branch=Weight(learned="layer"),
)
METHODS["rezero_ln"] = replace(
    REZERO,
    equation="x' = LN(x + r F(x)), r learned from 0",
    citation="Transformer-Clinic, code of Understanding the Difficulty of Training Transformers (Liu et al., 2020)",
    arxiv="2004.08249",
    note="Not in the ReZero paper: its section 5.1 replaces LN by r. Transformer-Clinic names this method "
    "rezero_postln and recommends these options for IWSLT14.",
    post=True,
    recommended={
        "train.optimizer": "radam",
        "train.learning_rate": 7e-4,
        "train.warmup_steps": 6000,
        "model.dropout": 0.3,
        "model.attention_dropout": 0.1,
        "model.activation_dropout": 0.1,
    },
)
METHODS["admin"] = ADMIN = Recipe(
    equation="x' = LN(w * x + F(x)), w [D] learned from a profiling pass",
    citation="Understanding the Difficulty of Training Transformers (Liu et al., 2020)",
    arxiv="2004.08249",
    note="Before the first update, w is set to sqrt(Var(x) + sum of Var(F) over the earlier sub-layers), measured "
    "on one batch.",
    post=True,
    skip=Weight(learned="vector"),
    profiled=True,
    recommended={
        "train.optimizer": "radam",
        "train.learning_rate": 1e-3,
        "train.warmup_steps": 8000,
        "train.weight_decay": 0.0,
        "model.attention_dropout": 0.1,
        "model.activation_dropout": 0.1,
    },
)


def _admin_from(start: Rule, order: str, formula: str) -> Recipe:
    """Returns Admin with skip weights initialised from the depth instead of a profiling pass."""
    return replace(
        ADMIN,
        equation=f"x' = LN(w * x + F(x)), w [D] learned from {formula}, n the number of sub-layers",
        note=f"Admin without profiling, as in admin-torch: the first updates change the output by order {order}.",
        skip=Weight(start, learned="vector"),
        profiled=False,
    )


METHODS["admin_log"] = _admin_from(by.admin_log, "log n", "sqrt((n + 1) / ln(n + 1) - 1)")
METHODS["admin_constant"] = _admin_from(by.admin_constant, "1", "sqrt(n)")
METHODS["admin_linear"] = _admin_from(ONE, "n", "1")
METHODS["layerscale"] = replace(
    PRE_LN,
    equation="x' = x + s * F(LN(x)), s [D] learned from a small value",
    citation="Going deeper with Image Transformers (Touvron et al., 2021)",
    arxiv="2103.17239",
    branch=Weight(by.layerscale_start, learned="vector"),
)
METHODS["skipinit"] = Recipe(
    equation="x' = x + s F(x), s learned from 0, one per sub-layer",
    citation="Batch Normalization Biases Residual Blocks Towards the Identity Function (De and Smith, 2020)",
    arxiv="2002.10444",
    branch=Weight(ZERO, learned="sublayer"),
)
METHODS["ds_init"] = DS_INIT = replace(
    POST_LN,
    equation="x' = LN(x + F(x)), weights of layer l start l^(-1/2) as large",
    citation="Improving Deep Transformer with Depth-Scaled Initialization (Zhang et al., 2019)",
    arxiv="1908.11365",
    note="q, k and v are initialised as in the official code: as one [D, 3D] matrix in self-attention, and as three "
    "[D, D] matrices, sqrt(2) times as large, in cross-attention.",
    gain=_depth_scaled(-0.5),
)
METHODS["ds_init_code"] = replace(
    DS_INIT,
    equation="x' = LN(x + F(x)), weights of layer l start l^(-1/4) as large",
    note="The initialisation of the official code, which applies l^(-1/2) to the variance. Its q, k and v are fused "
    "in self-attention only, as in ds_init.",
    gain=_depth_scaled(-0.25),
)
METHODS["t_fixup"] = Recipe(
    equation="x' = x + F(x), weights and embeddings start depth-scaled",
    citation="Improving Transformer Optimization Through Better Initialization (Huang et al., 2020)",
    note="q and k keep the gain of the base initialisation, as in the official code; the paper uses Xavier for all.",
    gain=dict.fromkeys(("o", "fc1", "fc2"), by.t_fixup_gain)
    # The base draws v as part of a fused matrix, with gain 1/sqrt(2). The factor sqrt(2) undoes this gain.
    | {"v": scaled(by.t_fixup_gain, 2**0.5)}
    | dict.fromkeys(("embedding/source", "embedding/shared", "embedding/target"), by.t_fixup_embedding_gain),
    recommended={
        "train.schedule": "inverse_sqrt_nowarmup",
        "train.decay_steps": 4000,
        "train.learning_rate": 5e-4,
        "train.optimizer": "adamw",
        "train.weight_decay": 1e-4,
        "model.dropout": 0.5,
    },
)
METHODS["fixup"] = FIXUP = Recipe(
    equation="x' = x + k F(x - s), k and s learned scalars, no biases",
    citation="Fixup Initialization: Residual Learning Without Normalization (Zhang et al., 2019)",
    arxiv="1901.09321",
    note="The papers on depth call it R-Fixup. A tied output table keeps the initial embedding, so only untied "
    "logits are 0 at the start.",
    branch=Weight(learned="sublayer"),
    shifts=True,
    biases=False,
    final="shift",
    gain=dict.fromkeys(("q", "k", "v"), by.branches_power(-1 / 6))
    | {"fc1": by.branches_power(-1 / 2)}
    | dict.fromkeys(("o", "fc2", "embedding/output"), ZERO),
    recommended={"model.dropout": 0.5},
)
METHODS["fixup_code"] = replace(
    FIXUP,
    note="The initialisation of the official code: cross-attention always has the factor of 12 branches.",
    gain={**FIXUP.gain, **dict.fromkeys(("cross/q", "cross/k", "cross/v"), always(12 ** (-1 / 6)))},
)
METHODS["small_init"] = SMALL_INIT = replace(
    PRE_LN,
    equation="x' = x + F(LN(x)), attention starts as N(0, 2/(5D))",
    citation="Transformers without Tears (Nguyen and Salazar, 2019)",
    arxiv="1910.05895",
    init="small",
)
METHODS["pre_scale_norm"] = replace(
    SMALL_INIT,
    equation="x' = x + F(ScaleNorm(x)), small initialisation, FixNorm",
    recommended={
        "model.norm": "scale_norm",
        "model.embedding": "fixnorm",
        "model.word_dropout": 0.1,
        "train.warmup_steps": 8000,
        "train.adam_b2": 0.999,
        "train.weight_decay": 0.0,
        "train.clip_norm": 1.0,
    },
)
METHODS["sub_ln"] = replace(
    PRE_LN,
    equation="x' = x + F(LN(x)), another LN before the output matrix of self-attention and feed-forward",
    citation="Magneto: A Foundation Transformer (Wang et al., 2022)",
    arxiv="2210.06423",
    note="Cross-attention has neither the inner norm nor the gain.",
    inner_norm=frozenset({"self", "ffn"}),
    init="xavier_normal",
    gain=dict.fromkeys(("self/v", "self/o", "fc1", "fc2"), by.sub_ln_gamma),
)
METHODS["normformer"] = NORMFORMER = replace(
    PRE_LN,
    equation="x' = x + LN(scaled heads(LN(x))); x' = x + fc2(LN(act(fc1(LN(x)))))",
    citation="NormFormer: Improved Transformer Pretraining with Extra Normalization (Shleifer et al., 2021)",
    arxiv="2110.09456",
    note="In both stacks' self-attention and feed-forward; cross-attention stays plain. " + FAIRSEQ_NOTE,
    branch_norm=frozenset({"self"}),
    inner_norm=frozenset({"ffn"}),
    head_scale=frozenset({"self"}),
)
METHODS["normformer_residual"] = replace(
    NORMFORMER,
    equation=NORMFORMER.equation.replace("= x + fc2", "= w * x + fc2"),
    skip=Weight(learned="vector", on=frozenset({"ffn"})),
)
METHODS["normformer_fairseq"] = replace(
    NORMFORMER,
    note="The computation of fairseq: the factors of the heads multiply the output of o. " + FAIRSEQ_NOTE,
    head_scale_last=True,
)
METHODS["dlcl"] = DLCL = replace(
    PRE_LN,
    equation="x_l = sum over k <= l of W[l,k] LN(y_k), y_k the output of Pre-LN layer k",
    citation="Learning Deep Transformer Models for Machine Translation (Wang et al., 2019)",
    arxiv="1906.01787",
    stream="combination",
    recommended={
        "train.learning_rate": 2e-3,
        "train.warmup_steps": 16000,
        "train.adam_b2": 0.997,
        "train.weight_decay": 0.0,
        "model.attention_dropout": 0.1,
        "model.activation_dropout": 0.1,
    },
)
METHODS["dlcl_post"] = replace(
    DLCL,
    equation="x_l = LN(sum over k <= l of W[l,k] y_k), y_k the output of Post-LN layer k",
    pre=False,
    post=True,
    final="",
    stream="combination_post",
)
METHODS["residual_dual"] = replace(
    POST_LN,
    equation="x' = LN(x + F(x)), r' = r + F(x); in the end x + LN(r)",
    citation="ResiDual: Transformer with Dual Residual Connections (Xie et al., 2023)",
    arxiv="2304.14802",
    note=FAIRSEQ_NOTE,
    stream="dual",
    final="norm",
    final_epsilon=1e-7,
)
METHODS["b2t"] = replace(
    POST_LN,
    equation="x' = LN(x + F(x)), the last sub-layer adds its layer's input",
    citation="B2T Connection: Serving Stability and Performance in Deep Transformers (Takase et al., 2023)",
    arxiv="2206.00330",
    note=FAIRSEQ_NOTE + " The official code scales matrices only; here the gain also scales biases that do not "
    "start at 0.",
    stream="bottom_to_top",
    gain=dict.fromkeys(ALL_MATRICES, by.depth_power(-0.5)),
)
METHODS["lns"] = LNS = replace(
    PRE_LN,
    equation="x' = x + F(LN(x) / sqrt(l))",
    citation="The Curse of Depth in Large Language Models (Sun et al., 2025)",
    arxiv="2502.05795",
    pre_scale=by.layer_power(-0.5),
)
METHODS["mix_ln"] = replace(
    PRE_LN,
    equation="the first quarter of the layers Post-LN, the others Pre-LN",
    citation="Mix-LN: Unleashing the Power of Deeper Layers (Li et al., 2024)",
    arxiv="2412.13795",
    post_layers=by.first_quarter,
)
METHODS["keel"] = Recipe(
    equation="x' = LN(n x + F(LN(x))), n the number of sub-layers; first layer: n = 1, attention x + F(LN(x))",
    citation="Post-LayerNorm Is Back: Stable, Expressive, and Deep (2026)",
    arxiv="2601.19895",
    note="The paper's norms have a scale and no bias. Its models are decoder-only; here cross-attention has the "
    "rule of the feed-forward, and no norm follows the last layer.",
    pre=True,
    post=True,
    post_first=by.after_first,
    skip=Weight(by.keel_skip),
    recommended={"model.norm": "rms_norm"},
)
METHODS["gpas"] = replace(
    PRE_LN,
    equation="y = x + F(LN(x)), x' = y - silu(g) stop_gradient(y), g learned from 0, one per sub-layer",
    citation="GPAS: Gradient-Preserving Activation Scaling (2025)",
    arxiv="2506.22049",
    note="The stream shrinks by 1 - silu(g), but gradients pass through as in Pre-LN. The sub-layers of a layer share "
    "one g in the official code, which also clips the gradient of g in some runs; here each has its own.",
    damped=True,
)
METHODS["deepnorm_deeploop"] = replace(
    DEEPNORM,
    equation="x' = LN(sqrt(n) x + F(x)), n the number of sub-layers",
    citation="DeepLoop (2026)",
    arxiv="2607.13491",
    note="Skip weight sqrt(n) and gain 1 / (2 sqrt(n)). The paper gives (2N)^(1/2) and (8N)^(-1/2) for N layers of a "
    "decoder-only model, which has n = 2N; with a cross-attention, n = 3M in the decoder. DeepNorm's exponents are "
    "1/4. The paper's models run the same layers several times; here only its constants are used.",
    skip=Weight(by.sublayers_power(0.5)),
    gain=dict.fromkeys(BRANCH_MATRICES, scaled(by.sublayers_power(-0.5), 0.5)),
)
METHODS["siamese_norm"] = Recipe(
    equation="x = LN(x), h = F(LN(x + LN(y))), x' = x + h / sqrt(2 l), y' = y + h; in the end LN(LN(x) + LN(y))",
    citation="SiameseNorm: Breaking the Barrier to Reconciling Pre/Post-Norm (2026)",
    arxiv="2602.08064",
    note="Two streams that start as the embedding: x as in Post-LN and y as in Pre-LN, as in the official DeiT model. "
    "2 l counts the sub-layers up to layer l. In a decoder with cross-attention, which the paper does not have, they "
    "are 3 l.",
    pre=True,
    branch=Weight(by.sublayers_so_far_power(-0.5)),
    stream="siamese",
    final="norm",
)
METHODS["mhc"] = replace(
    PRE_LN,
    equation="u = sum of pre_i X_i, X' = R X + post F(LN(u)), 4 streams X, R doubly stochastic",
    citation="mHC: Manifold-Constrained Hyper-Connections (Xie et al., 2025)",
    arxiv="2512.24880",
    note="pre, post and R depend on the token, see branchnorm_jax/model/streams.py. Their norm has no scale, because W "
    "can have it. W starts as N(0, 1/(4 D)), the scalars s at 0.01 and the biases at 0, as in MaxText, which is one of "
    "several choices in use: then R starts as the mean of the streams. The streams take 4 times the memory of one.",
    stream="hyper",
)
METHODS["block_attnres"] = replace(
    PRE_LN,
    equation="x' = x + F(LN(u)), u = sum of softmax(w . RMSNorm(v_i)) v_i over x and the sums v of earlier blocks",
    citation="Attention Residuals (Kimi Team, 2026)",
    arxiv="2603.15031",
    note="A stack has 8 blocks of layers, of almost equal size. x is the sum of the branches of the block, and the "
    "embedding is the first v. Each sub-layer and the end of the stack have a vector w, from 0; the scale of its norm, "
    "which only multiplies w, is left out. The stored v take 8 times the memory of x, in every layer whose input is "
    "kept for the backward pass: model.remat=nested keeps few.",
    stream="blocks",
)
METHODS["completep"] = COMPLETEP = replace(
    PRE_LN,
    equation="x' = x + F(LN(x)) / m, m the number of layers / model.base_layers",
    citation="Don't be lazy: CompleteP enables compute-efficient deep transformers (Dey et al., 2025)",
    arxiv="2505.01618",
    note="For options tuned at a depth of model.base_layers. Adam's epsilon of the layers is divided by m; learning "
    "rate and weight decay stay. These are the paper's rules of depth (its Table 1), without those of width. Each "
    "stack has the m of its own depth; the paper's models are decoder-only.",
    depth_power=1.0,
)
METHODS["depth_mup"] = replace(
    COMPLETEP,
    equation="x' = x + F(LN(x)) / sqrt(m), m the number of layers / model.base_layers",
    citation="Tensor Programs VI: Feature Learning in Infinite-Depth Neural Networks (Yang et al., 2023)",
    arxiv="2310.02244",
    note="In the form of CompleteP's paper (alpha = 1/2): the learning rate and Adam's epsilon of the layers are "
    "divided by sqrt(m). Otherwise as completep.",
    depth_power=0.5,
)


def _prores(base: Recipe, equation: str) -> Recipe:
    """Returns `base` with Progressive Residual Warmup."""
    return replace(
        base,
        equation=equation,
        citation="Progressive Residual Warmup (2026)",
        arxiv="2603.05369",
        note="alpha grows from the bottom of a stack to its top (model.alpha_order): layer l reaches its end at l / L "
        "of model.alpha_steps. The paper's models are decoder-only, initialised with N(0, 0.02).",
        branch=Weight(ZERO, end=ONE),
        recommended={"model.alpha_order": "linear"},
    )


METHODS["prores_post_ln"] = _prores(POST_LN, "x' = LN(x + alpha_l,t F(x))")
METHODS["prores_pre_ln"] = _prores(PRE_LN, "x' = x + alpha_l,t F(LN(x))")
METHODS["prores_deepnorm"] = _prores(DEEPNORM, "x' = LN(a x + alpha_l,t F(x)), a from the depth")
METHODS["prores_sandwich"] = _prores(SANDWICH, "x' = x + alpha_l,t LN(F(LN(x)))")
METHODS["prores_lns"] = _prores(LNS, "x' = x + alpha_l,t F(LN(x) / sqrt(l))")


def recipe_of(config: ModelConfig) -> Recipe:
    """Returns the recipe of the config's method, with the options of the config that add to it."""
    recipe = get_recipe(config.method)
    if config.embedding_norm:
        recipe = replace(recipe, embedding_norm=True)
    if recipe.depth_power:
        recipe = replace(recipe, branch=Weight(by.relative_depth(config.base_layers, -recipe.depth_power)))
    return recipe


def get_recipe(method: str) -> Recipe:
    """Returns the recipe of a method. Raises `UserError`, with the nearest name, for an unknown one."""
    if method not in METHODS:
        # Users write PreLN or pre-ln.
        plain = {name.replace("_", ""): name for name in METHODS}
        near = difflib.get_close_matches(re.sub(r"\W|_", "", method.lower()), plain, 1)
        hint = f"did you mean {plain[near[0]]!r}? " if near else ""
        raise UserError(f"config: no method {method!r}; {hint}--mode=methods lists all")
    return METHODS[method]
