"""`lens`: what a model would say after each layer."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from hooked_lm.cli.command import Result, command
from hooked_lm.cli.inputs import check_writable, decoder, integers
from hooked_lm.cli.options import ModelArgument, PromptArgument
from hooked_lm.cli.output import records, say, say_path, show_table
from hooked_lm.cli.prompts_and_sites import prompt_of, short_name

if TYPE_CHECKING:
    import pandas as pd


@command("hooked-lm lens demo 'The capital of France is' --k 3")
def lens(
    model: ModelArgument,
    prompt: PromptArgument,
    positions: Annotated[
        str, typer.Option(help="The tokens after which the next one is shown, such as 0,-1 or 0-3.")
    ] = "-1",
    site: Annotated[
        str, typer.Option("--site", "--sites", help="The short name of a site: resid_post, attn_out, mlp_out.")
    ] = "resid_post",
    k: Annotated[int, typer.Option(help="The number of likely tokens to show.")] = 5,
    html: Annotated[Path | None, typer.Option(help="Also write the grid of all positions to this page.")] = None,
) -> Result:
    """Show the likely next tokens after each layer.

    The residual stream is decoded by the final norm and the unembedding (the logit lens). The last layer comes first.
    """
    from hooked_lm import analysis, viz
    from hooked_lm.reports.sweep import parts_of_position

    check_writable(html)
    loaded = decoder(model, "lens")
    given, words = prompt_of(loaded, prompt)
    places, site = integers("positions", positions), short_name(site)
    table = analysis.logit_lens(loaded, given, site=site, k=k, positions=places).to_dataframe()
    for place, (_, part) in zip(places, table.groupby("position", sort=False), strict=True):
        say(f"The next token after {escape(viz.visible(words[place]))}, with its probability:")
        show_table([_row(layer, group) for layer, group in reversed(list(part.groupby("layer", sort=False)))])
    if html is not None:
        figure = analysis.logit_lens(loaded, given, site=site, k=k).plot(title=f"Logit lens: {prompt}")
        viz.write_html(figure, html)
        say_path("page:", html)
    columns = ["position", "layer", "rank", "token", "id", "logit", "probability"]
    rows = [{**row, "position": parts_of_position(str(row["position"]))[0]} for row in records(table[columns])]
    return {"model": model, "tokens": words, "rows": rows, "html": html and html.resolve()}


def _row(layer: object, group: "pd.DataFrame") -> dict[str, object]:
    """The tokens of one layer, the most likely first."""
    from hooked_lm import viz

    tokens = zip(group["token"], group["probability"], strict=True)
    shown = {
        str(n): "-" if share != share else f"{viz.visible(token)} {share:.2f}"  # NaN
        for n, (token, share) in enumerate(tokens, 1)
    }
    return {"layer": layer, **shown}
