"""Imports all that tests import, in the process from which those of mutants are forked: it takes longer than most tests."""

import contextlib
import io
import os
import pkgutil
from importlib import import_module

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

with contextlib.redirect_stderr(io.StringIO()):  # torchao reports kernels that it cannot load
    from annotation_checks import check_annotations_of

    check_annotations_of("hooked_lm")  # as conftest.py does
    import hooked_lm

    for module in pkgutil.walk_packages(hooked_lm.__path__, "hooked_lm."):
        if "shim" not in module.name and not module.name.endswith("__main__"):
            import_module(module.name)
    import hypothesis.stateful  # noqa: F401
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama  # noqa: F401

    import tests.families  # noqa: F401
