"""TransformerBridge."""

from transformer_lens.model_bridge.bridge import TransformerBridge
