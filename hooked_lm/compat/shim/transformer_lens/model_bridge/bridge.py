"""TransformerBridge."""

from hooked_lm.compat.bridge import TransformerBridge
