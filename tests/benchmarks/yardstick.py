"""A fixed amount of work, to compare CPU seconds of machines that differ in speed: a figure is a ratio to it.

python -m tests.benchmarks.yardstick
"""

import time
from collections.abc import Callable

import torch
from torch.nn.functional import gelu

ROUNDS = 3  # the quickest counts, as other load slows some of them


def yardstick() -> float:
    """CPU seconds of products of matrices, elementwise operations and Python, about equal parts, in one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            return sum(min(cpu_seconds(part) for _ in range(ROUNDS)) for part in (products, elementwise, python))
    finally:
        torch.set_num_threads(threads)


def in_yardsticks(used: float, unit: float) -> str:
    """CPU seconds, and how many times a yardstick they are."""
    return f"{used:.0f} CPU seconds, {used / unit:.0f} times the yardstick ({unit:.2f} s)"


def cpu_seconds(part: Callable[[], object]) -> float:
    start = time.process_time()
    part()
    return time.process_time() - start


def products() -> None:
    for rows in (1, 16, 256):
        a, b = torch.full((rows, 768), 0.5), torch.full((768, 768), 0.25)
        for _ in range(40000 // (rows + 100)):
            a @ b


def elementwise() -> None:
    x = torch.linspace(-3, 3, 1 << 18)
    for _ in range(900):
        gelu(x).softmax(-1)


def python() -> None:
    words = {f"blocks.{i}.hook_resid_pre": i for i in range(500)}
    for _ in range(4000):
        sorted(name.removeprefix("blocks.").split(".")[0] for name, i in words.items() if i % 7)


if __name__ == "__main__":
    print(f"{yardstick():.3f} CPU seconds")
