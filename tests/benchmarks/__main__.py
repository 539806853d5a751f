"""`make bench`: speed and memory as ratios measured in one run. Name parts to run only those.

python -m tests.benchmarks forward generation loading import compile attribution
python -m tests.benchmarks interventions harvest attention prefixes vision split estimates
python -m tests.benchmarks sweeps [1x16 1x64 8x16 8x64]  (half an hour; makes environments for TransformerLens first)
python -m tests.benchmarks families [model_type ...]     (`make bench` runs it last: it takes long)
python -m tests.benchmarks prefix-families [model_type ...]  (differences, not times)
"""

import os
import sys

import torch

from tests.benchmarks.attention_memory import attention_memory_figures
from tests.benchmarks.attribution import attribution_figures
from tests.benchmarks.estimates import estimate_figures
from tests.benchmarks.families import family_figures
from tests.benchmarks.harvesting import harvest_figures
from tests.benchmarks.interventions import detector_figures
from tests.benchmarks.loading import compile_figure, import_figures, loading_figures
from tests.benchmarks.prefix_families import show_prefix_families
from tests.benchmarks.prefixes import prefix_figures
from tests.benchmarks.running import forward_figures, generation_figures
from tests.benchmarks.splitting import splitting_figures
from tests.benchmarks.sweeps import sweep_tables
from tests.benchmarks.timing import show
from tests.benchmarks.vision import vision_figures
from tests.benchmarks.yardstick import in_yardsticks, yardstick

PARTS = {
    "forward": ("Forward and caches, GPT-2-small size, fp32", forward_figures),
    "generation": ("Generation", generation_figures),
    "loading": ("Loading a local directory on the CPU", loading_figures),
    "import": ("Import", import_figures),
    "compile": ("Compiling", lambda: [compile_figure()]),
    "interventions": ("Ten detectors on ten sites, GPT-2-small size, fp32", detector_figures),
    "harvest": ("Harvests, GPT-2-small size, fp32", harvest_figures),
    "attribution": ("Attribution, GPT-2-small size, fp32", attribution_figures),
    "attention": ("Attention over a long prompt, 2 layers of 8 heads, fp32", attention_memory_figures),
    "estimates": ("Estimates of memory, 4 layers of width 256, fp32", estimate_figures),
    "split": ("A model on two processes of gloo, 6 layers of width 768, fp32", splitting_figures),
    "prefixes": ("Prefixes and chunks, 4 layers of width 256, fp32", prefix_figures),
    "vision": ("Models that read images, 4 layers of width 768, fp32", vision_figures),
}


def main(names: list[str]) -> None:
    """Run the parts that are named, or all of PARTS and the sweeps; `sweeps` and `families` take the names that follow."""
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; medians of ratios, ours / theirs")
    if names[:1] == ["prefix-families"]:
        show_prefix_families(names[1:])
        return
    if names[:1] == ["families"]:
        show("Forward of every family, 12 layers of width 768, fp32", family_figures(names[1:]))
        return
    if names[:1] != ["sweeps"]:
        for name in names or PARTS:
            title, figures = PARTS[name]
            show(title, figures())
    if not names or names[0] == "sweeps":
        for title, measured in sweep_tables(names[1:]):
            show(title, measured)


if __name__ == "__main__":
    main(sys.argv[1:])
    print(in_yardsticks(sum(os.times()[:4]), yardstick()))
