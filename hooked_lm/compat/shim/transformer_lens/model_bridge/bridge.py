"""The model under the names of both styles."""

from hooked_lm.compat.bridge import TransformerBridge
