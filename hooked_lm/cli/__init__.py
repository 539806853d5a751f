"""The command `hooked-lm`, a module for each command. Each imports what it needs when it runs, so that `--help` is fast."""

from hooked_lm.cli import (
    attention,
    cache,
    circuit,
    demo,
    doctor,
    generate,
    harvest,
    lens,
    mcp,
    models,
    patch,
    sites,
    steer,
    verify,
)
from hooked_lm.cli.command import EXAMPLES, app

__all__ = [
    "EXAMPLES",
    "app",
    "attention",
    "cache",
    "circuit",
    "demo",
    "doctor",
    "generate",
    "harvest",
    "lens",
    "mcp",
    "models",
    "patch",
    "sites",
    "steer",
    "verify",
]
