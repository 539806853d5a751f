"""Clients from PyPI run in an environment of their own; the shim is their `transformer_lens` (`make clients`)."""

import sys
from pathlib import Path

from hooked_lm import compat

compat.install()
sys.path.append(str(Path(__file__).parent))  # programs import each other as they do when they run by themselves

# Programs that tests run with the original on the path.
collect_ignore = [
    "acdc_run.py",
    "circuit_tracer_run.py",
    "circuitkit_run.py",
    "converters.py",
    "flat_originals.py",
    "fold_of_the_original.py",
    "gim_run.py",
    "jacobian_lens_of_4.py",
    "mib_run.py",
    "originals.py",
    "sae_dashboard_run.py",
    "sae_lens_run.py",
    "sae_probes_run.py",
    "tools_of_4.py",
    "towers_of_4.py",
    "utilities_calls.py",
]
