"""`attention`: where the heads of a model look, as a page."""

from pathlib import Path
from typing import Annotated

import typer

from hooked_lm.cli.command import Result, command
from hooked_lm.cli.inputs import check_writable, decoder, integers
from hooked_lm.cli.options import ModelArgument, PromptArgument
from hooked_lm.cli.output import say_path
from hooked_lm.cli.prompts_and_sites import prompt_of


@command("hooked-lm attention demo 'Mary gave it to John, and Mary left' --layers 0,1")
def attention(
    model: ModelArgument,
    prompt: PromptArgument,
    layers: Annotated[str | None, typer.Option(help="Only these layers, such as 0,-1 or 0-2.")] = None,
    heads: Annotated[str | None, typer.Option(help="Only these heads, such as L1H7,L2H0.")] = None,
    positions: Annotated[
        str | None, typer.Option(help="Only what the tokens at these positions look at, such as -1 or 0-9.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "--output", help="The path of the page.")] = Path(
        "hooked_lm_attention.html"
    ),
) -> Result:
    """Write a page of attention patterns.

    Choose a head among thumbnails; hover over a token to see where it looks. The page loads nothing from the network. With
    --json, the patterns of --heads are data, too: of each head a row for each token that looks, with its weights of all tokens.
    Of a long prompt give --positions: the rows of other tokens are not computed.
    """
    from hooked_lm import viz

    check_writable(out)
    loaded = decoder(model, "attention")
    (given, words), n_layers = prompt_of(loaded, prompt), loaded.cfg.n_layers
    every = {each: f"blocks.{each}.attn.hook_pattern" for each in range(n_layers)}
    every = {each: name for each, name in every.items() if name in loaded.hook_dict}
    chosen = list(every) if layers is None else integers("layers", layers)
    if wrong := [each for each in chosen if each % n_layers not in every or not -n_layers <= each < n_layers]:
        raise IndexError(f"there is no attention in a layer {wrong[0]}; the layers with attention are {list(every)}")
    if not every:
        raise ValueError(f"{model} has no attention")
    names = {each: every[each] for each in sorted({each % n_layers for each in chosen})}
    looking = list(range(len(words))) if positions is None else integers("positions", positions)
    rows = loaded.attention_rows(given, layers=list(names), query_positions=looking)
    patterns = {each: of_layer[0] for each, of_layer in rows.items()}
    tokens, keys = (words, None) if positions is None else ([words[position] for position in looking], words)
    labels = None if heads is None else [label.strip() for label in heads.split(",")]
    viz.attention(patterns, tokens, keys, heads=labels, title=f"Attention of {model}: {prompt}").write_html(out)
    shown = {f"L{layer}H{head}": rows for layer, pattern in patterns.items() for head, rows in enumerate(pattern)}
    values = {label: shown[label].tolist() for label in labels or ()}
    n_heads = len(labels) if labels else sum(len(pattern) for pattern in patterns.values())
    say_path(f"{n_heads} heads of {len(names)} layers:", out)
    return {
        "model": model, "tokens": words, "layers": list(names), "positions": [each % len(words) for each in looking],
        "n_heads": n_heads, "patterns": values, "html": out.resolve()
    }  # fmt: skip
