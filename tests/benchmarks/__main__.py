"""`make bench`: speed and memory as ratios measured in one run. Name parts to run only those.

python -m tests.benchmarks forward generation loading import compile
"""

import sys

import torch

from tests.benchmarks.loading import compile_figure, import_figures, loading_figures
from tests.benchmarks.running import forward_figures, generation_figures
from tests.benchmarks.timing import show

PARTS = {
    "forward": ("Forward and caches, GPT-2-small size, fp32", forward_figures),
    "generation": ("Generation", generation_figures),
    "loading": ("Loading a local directory on the CPU", loading_figures),
    "import": ("Import", import_figures),
    "compile": ("Compiling", lambda: [compile_figure()]),
}


def main(names: list[str]) -> None:
    """Run the parts that are named, or all."""
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; medians of ratios, ours / theirs")
    for name in names or PARTS:
        title, figures = PARTS[name]
        show(title, figures())


if __name__ == "__main__":
    main(sys.argv[1:])
