"""Models under the names of both styles."""

from transformer_lens.model_bridge.bridge import TransformerBridge
