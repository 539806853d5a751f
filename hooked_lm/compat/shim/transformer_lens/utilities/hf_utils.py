"""Files and data sets of the hub."""

import random
import time

from huggingface_hub import get_token as get_hf_token

from hooked_lm.compat.attributes import select_compatible_kwargs
from hooked_lm.compat.downloads import (
    CACHE_DIR,
    clear_huggingface_cache,
    download_file_from_hf,
    get_rotary_pct_from_config,
    keep_single_column,
)
from hooked_lm.hub.datasets import get_dataset
from hooked_lm.hub.retries import call_hf_with_retry, enable_hf_retry
