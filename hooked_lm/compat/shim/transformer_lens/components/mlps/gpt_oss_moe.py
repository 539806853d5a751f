"""The experts of gpt-oss."""

from hooked_lm.compat.parts import CanBeUsedAsMLP, GptOssExpert, GptOssMoE
from hooked_lm.compat.parts.mlps import GPT_OSS_ALPHA, GPT_OSS_LIMIT
from hooked_lm.hooks import HookPoint
from hooked_lm.models.config.flat import HookedTransformerConfig
