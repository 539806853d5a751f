"""FlauBERT (Le et al. 2020, arXiv:1912.05372): a French XLM.

With `pre_norm` transformers fails in `FlaubertModel.forward`, which asks its cache for a layer: there is nothing to compare with.
"""

from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.encoders import xlm
from hooked_lm.families.encoders.xlm import IGNORED, NO_EFFECT, PREFIX, rows
from hooked_lm.models.config.tree import EncoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]


def config(hf: HFConfig) -> EncoderConfig:
    hf.require(pre_norm=False)
    return xlm.config(hf)
