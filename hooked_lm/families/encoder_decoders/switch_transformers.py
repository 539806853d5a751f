"""Switch Transformers (Fedus et al. 2021, arXiv:2101.03961): T5 with experts in some layers; each token uses one expert."""

from collections.abc import Sequence
from dataclasses import replace

from hooked_lm.components.experts.moe import MoE
from hooked_lm.components.experts.router import CapacityRouter
from hooked_lm.components.mlp import MLP
from hooked_lm.families._shared import classic, t5_like
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.t5_like import IGNORED, PREFIX, attention_half_rows, mlp_rows, outer_rows
from hooked_lm.models.config.tree import EncoderDecoderConfig, SideBlockConfig
from hooked_lm.weights import Row, expand

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

# training options, fields that transformers ignores, and those that *_sparse_step repeat
NO_EFFECT = (
    *t5_like.NO_EFFECT,
    *("router_*_loss_coef", "router_jitter_noise", "router_ignore_padding_tokens", "add_router_probs"),
    *("num_sparse_*_layers", "add_cross_attention", "router_type", "num_selected_experts", "batch_prioritized_routing"),
)


def config(hf: HFConfig) -> EncoderDecoderConfig:
    if hf.router_dtype != "float32":
        raise ValueError(f"router_dtype {hf.router_dtype!r} is not supported; 'float32' is")
    dense = MLP.Config(hf.d_model, hf.d_ff, hf.dense_act_fn, bias=False)
    sparse = MoE.Config(dense, hf.num_experts, 1, CapacityRouter(hf.expert_capacity), router_bias=hf.router_bias)
    tree = t5_like.encoder_decoder(hf, dense, scale=hf.d_model**-0.5 if hf.tie_word_embeddings else 1.0)
    tree = replace(
        tree,
        encoder=replace(tree.encoder, blocks=with_experts(tree.encoder.blocks, hf.encoder_sparse_step, sparse)),
        decoder=replace(tree.decoder, blocks=with_experts(tree.decoder.blocks, hf.decoder_sparse_step, sparse)),
    )
    return tree if hf.tie_word_embeddings else replace(tree, decoder_embed=tree.embed, spare_embed=tree.embed)


def with_experts(blocks: Sequence[SideBlockConfig], step: int, sparse: MoE.Config) -> tuple[SideBlockConfig, ...]:
    """The blocks, with experts in every `step`-th one, starting from the second; none if `step` is 0."""
    is_sparse = [step == 1 or (step > 0 and layer % step == 1) for layer in range(len(blocks))]
    return tuple(
        replace(block, mlp=sparse) if has_experts else block
        for block, has_experts in zip(blocks, is_sparse, strict=True)
    )


def rows(tree: EncoderDecoderConfig) -> list[Row]:
    """Rows of every weight that such a model can have; rows of weights that a model lacks are skipped when loading."""
    return [
        *outer_rows(tree),
        *attention_half_rows(tree),
        *side_rows(tree.encoder.blocks, "encoder.block.{i}.layer.1.mlp.", "encoder.{i}.mlp."),
        *side_rows(tree.decoder.blocks, "decoder.block.{i}.layer.2.mlp.", "decoder.{i}.mlp."),
    ]


def side_rows(blocks: Sequence[SideBlockConfig], source: str, target: str) -> list[Row]:
    """Rows of the encoder's or decoder's MLPs and experts."""
    found = []
    for layer, block in enumerate(blocks):
        if isinstance(block.mlp, MoE.Config):
            expert, n_experts = block.mlp.expert, block.mlp.n_experts
            assert isinstance(expert, MLP.Config)
            rows = [
                *mlp_rows(expert, source + "experts.expert_{x}.", target + "experts.{x}."),
                *classic.linear(source + "router.classifier", target, "router"),
            ]
            found += expand(rows, i=[layer], x=n_experts)
        else:
            assert isinstance(block.mlp, MLP.Config)
            found += expand(mlp_rows(block.mlp, source, target), i=[layer])
    return found
