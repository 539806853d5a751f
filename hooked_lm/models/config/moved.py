"""Where components that saved configs name by an earlier module are now, so that these configs load."""

# A former module, or one class of it -> the module now, or the class in it; all inside the package.
MOVED = {
    "components.adapters": "families.decoders.zamba2.adapters",
    "components.attention.block_local": "families.encoder_decoders.pegasus_x.block_local",
    "components.attention.clipped": "families.decoders.olmoe.clipped",
    "components.attention.compressed": "families.decoders.deepseek_v4.compressed",
    "components.attention.convolutional": "families.decoders.zaya.convolutional",
    "components.attention.grouped": "families.encoders.squeezebert.grouped",
    "components.attention.key_pool": "families.decoders.deepseek_v4.key_pool",
    "components.attention.merged": "families.encoder_decoders.t5gemma2.merged",
    "components.attention.mixed": "families.encoders.convbert.mixed",
    "components.attention.ngram": "families.encoder_decoders.prophetnet.attention",
    "components.attention.routed": "families.decoders.jetmoe.routed",
    "components.attention.shared_kv": "families.decoders.gemma4_text.shared_kv",
    "components.attention.tied_kv": "families.decoders.deepseek_v4.tied_kv",
    "components.attention.transient_global": "families.encoder_decoders.longt5.transient_global",
    "components.attention.value_mask": "families.decoders.doge.value_mask",
    "components.attention.value_source": "families.encoders.mobilebert.value_source",
    "components.attention.value_width": "families.decoders.mimo_v2_flash.value_width",
    "components.attention.wide": "families.decoders.zamba.wide",
    "components.attention.windowed:WindowAttention": "families.vision_encoders.qwen2_5_vl_vision.windowed:PatchWindowAttention",
    "components.blocks.adapter": "families.encoders.xmod.adapter",
    "components.blocks.altup": "families.decoders.gemma3n_text.altup",
    "components.blocks.attention_only": "components.blocks.one_sublayer",
    "components.blocks.conv": "families._shared.deberta_like.conv",
    "components.blocks.deepstack": "components.vision.deepstack",
    "components.blocks.global_stream": "families.encoder_decoders.pegasus_x.global_stream",
    "components.blocks.hybrid": "families.decoders.falcon_h1.hybrid",
    "components.blocks.hyper:HashHyperBlock": "families.decoders.deepseek_v4.hash_moe",
    "components.blocks.merged": "families.encoder_decoders.t5gemma2.merged",
    "components.blocks.mlp_only": "components.blocks.one_sublayer",
    "components.blocks.narrow": "families.encoders.mobilebert.narrow",
    "components.blocks.ngram": "families.encoder_decoders.prophetnet.block",
    "components.blocks.shared": "families.decoders.zamba.shared",
    "components.blocks.shortcut": "families.decoders.longcat_flash.shortcut",
    "components.blocks.weighted:RouterStateBlock": "families.decoders.zaya.router_state",
    "components.embeddings.replaced_embed": "families.encoder_decoders.t5gemma2.replaced_embed",
    "components.embeddings.trigram": "families.encoders.mobilebert.trigram",
    "components.experts.hash_moe": "families.decoders.deepseek_v4.hash_moe",
    "components.experts.normed_moe": "families.decoders.gemma4_text.normed_moe",
    "components.experts.router_state": "families.decoders.zaya.router_state",
    "components.fourier": "families.encoders.fnet.fourier",
    "components.hyper_connection": "components.blocks.hyper",
    "components.norms.gated_norm": "families.decoders.axk2.gated_norm",
    "components.norms.layer_scale": "components.norms.scales",
    "components.norms.no_norm": "components.norms.scales",
    "components.ssm.channel_mix": "families.decoders.rwkv.channel_mix",
    "components.ssm.kimi_delta": "families.decoders.kimi_linear.kimi_delta",
    "components.ssm.mamba_heads": "families.decoders.zamba.mamba_heads",
    "components.ssm.mlstm": "families.decoders.xlstm.mlstm",
    "components.ssm.short_conv": "families.decoders.lfm2.short_conv",
    "components.ssm.wkv": "families.decoders.rwkv.wkv",
    "components.vision.axis_positions": "components.vision.image_rules",
    "components.vision.image_features": "components.vision.image_context",
    "components.vision.image_masks": "components.vision.image_rules",
    "components.vision.tile_projector": "families.vision_languages.llava_next.tile_projector",
}


def present_name(module: str, path: str) -> tuple[str, str]:
    """The module and the qualified name of a class now, which a file says is `path` in `module`; both inside the package.

    >>> (
    ...     present_name("components.fourier", "FourierMixer.Config"),
    ...     present_name("components.mlp", "MLP"),
    ... )
    (('families.encoders.fnet.fourier', 'FourierMixer.Config'), ('components.mlp', 'MLP'))
    """
    kind, *inner = path.split(".")
    moved = MOVED.get(f"{module}:{kind}") or MOVED.get(module, module)
    module, _, renamed = moved.partition(":")
    return module, ".".join([renamed or kind, *inner])
