"""`lens`: what a model would say after each layer."""

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
    records,
    say,
    show_table,
)


@command("hooked-lm lens demo 'The capital of France is' --k 3")
def lens(
    model: ModelArgument,
    prompt: PromptArgument,
    position: Annotated[int, typer.Option(help="Of the token whose continuation is shown.")] = -1,
    site: Annotated[str, typer.Option(help="The short name of a site: resid_post, attn_out, mlp_out.")] = "resid_post",
    k: Annotated[int, typer.Option(help="How many tokens are shown.")] = 5,
    html: Annotated[Path | None, typer.Option(help="Also write the grid of all positions to this page.")] = None,
) -> Result:
    """Show the likely next tokens after each layer.

    The residual stream is decoded by the final norm and the unembedding (the logit lens). The last layer comes first.
    """
    from hooked_lm import analysis, viz

    check_writable(html)
    loaded = decoder(model, "lens")
    words = check_prompt(loaded, prompt)
    found = analysis.logit_lens(loaded, prompt, site=site, k=k, positions=[position])
    table = found.to_dataframe()
    rows = []
    for layer, group in reversed(list(table.groupby("layer", sort=False))):
        tokens = zip(group["token"], group["probability"], strict=True)
        rows.append(
            {
                "layer": layer,
                **{str(n): f"{viz.visible(token)} {share:.2f}" for n, (token, share) in enumerate(tokens, 1)},
            }
        )
    say(f"The next token after {escape(viz.visible(words[position]))}, with its probability:")
    show_table(rows)
    if html is not None:
        figure = analysis.logit_lens(loaded, prompt, site=site, k=k).plot(title=f"Logit lens: {prompt}")
        figure.write_html(html)
        say(f"page: [bold]{escape(str(html.resolve()))}[/]")
    columns = ["layer", "rank", "token", "id", "logit", "probability"]
    return {"model": model, "tokens": words, "rows": records(table[columns]), "html": html and html.resolve()}
