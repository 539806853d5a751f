"""The model of transformers, with which checkpoints are written, and with which `hooked-lm verify` compares."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


class ScaledLlamaConfig(LlamaConfig):
    model_type = "scaled_llama"
    embedding_scale: float = 1.0


class ScaledLlamaForCausalLM(LlamaForCausalLM):
    config_class = ScaledLlamaConfig

    def forward(
        self, input_ids: torch.Tensor | None = None, inputs_embeds: torch.Tensor | None = None, **options: Any
    ) -> Any:
        if inputs_embeds is None:
            inputs_embeds = self.config.embedding_scale * self.model.embed_tokens(input_ids)
        return super().forward(inputs_embeds=inputs_embeds, **options)


AutoConfig.register(ScaledLlamaConfig.model_type, ScaledLlamaConfig, exist_ok=True)
AutoModelForCausalLM.register(ScaledLlamaConfig, ScaledLlamaForCausalLM, exist_ok=True)
