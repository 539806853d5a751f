"""`attention`: where the heads of a model look, as a page."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from hooked_lm.cli.shared import (
    ModelArgument,
    PromptArgument,
    Result,
    check_prompt,
    check_writable,
    command,
    decoder,
    say,
)


@command("hooked-lm attention demo 'Mary gave it to John, and Mary left' --layer 0 --layer 1")
def attention(
    model: ModelArgument,
    prompt: PromptArgument,
    layer: Annotated[list[int] | None, typer.Option(help="A layer; may be repeated. All by default.")] = None,
    head: Annotated[list[str] | None, typer.Option(help="Only these heads: L1H7; may be repeated.")] = None,
    out: Annotated[Path, typer.Option("--out", "--output", help="The path of the page.")] = Path(
        "hooked_lm_attention.html"
    ),
) -> Result:
    """Write a page of attention patterns.

    Choose a head among thumbnails; hover over a token to see where it looks. The page loads nothing from the network.
    """
    from hooked_lm import viz

    check_writable(out)
    loaded = decoder(model, "attention")
    words, n_layers = check_prompt(loaded, prompt), loaded.cfg.n_layers
    every = {each: f"blocks.{each}.attn.hook_pattern" for each in range(n_layers)}
    every = {each: name for each, name in every.items() if name in loaded.hook_dict}
    if wrong := [each for each in layer or [] if each % n_layers not in every or not -n_layers <= each < n_layers]:
        raise IndexError(f"there is no attention in a layer {wrong[0]}; the layers with attention are {list(every)}")
    if not every:
        raise ValueError(f"{model} has no attention")
    names = {each: every[each] for each in sorted({each % n_layers for each in layer or every})}
    _, cache = loaded.run_with_cache(prompt, names_filter=list(names.values()), return_type=None)
    patterns = {each: cache[name][0] for each, name in names.items()}
    viz.attention(patterns, words, heads=head, title=f"Attention of {model}").write_html(out)
    n_heads = len(head) if head else sum(len(pattern) for pattern in patterns.values())
    say(f"{n_heads} heads of {len(names)} layers: [bold]{escape(str(out.resolve()))}[/]")
    return {"model": model, "tokens": words, "layers": list(names), "n_heads": n_heads, "html": out.resolve()}
