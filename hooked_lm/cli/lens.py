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

    from hooked_lm.analysis.reading.lens import Lens
    from hooked_lm.models.decoder import Decoder


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
    answers: Annotated[
        str | None, typer.Option(help="Also compare two next tokens, with their spaces: ' Mary, John'.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Also write the grid of all positions to this page.")] = None,
) -> Result:
    """Show the likely next tokens after each layer, and compare two answers.

    The residual stream is decoded by the final norm and the unembedding (the logit lens). The last layer comes first: its
    tokens are those that the model says.
    """
    from hooked_lm import analysis, viz
    from hooked_lm.reports.sweep import parts_of_position

    check_writable(html)
    loaded = decoder(model, "lens")
    given, words = prompt_of(loaded, prompt)
    places, site = integers("positions", positions), short_name(site)
    two = _two_answers(loaded, answers)
    found = analysis.logit_lens(loaded, given, site=site, k=k, positions=places, answers=two and [two])
    table = found.to_dataframe()
    for place, (_, part) in zip(places, table.groupby("position", sort=False), strict=True):
        say(f"The next token after {escape(viz.visible(words[place]))}, with its probability:")
        show_table([_row(layer, group) for layer, group in reversed(list(part.groupby("layer", sort=False)))])
    compared = None if two is None else _compared(found, *two)
    if html is not None:
        figure = analysis.logit_lens(loaded, given, site=site, k=k).plot(title=f"Logit lens: {prompt}")
        viz.write_html(figure, html)
        say_path("page:", html)
    columns = ["position", "layer", "rank", "token", "id", "logit", "probability"]
    rows = [{**row, "position": parts_of_position(str(row["position"]))[0]} for row in records(table[columns])]
    return {"model": model, "tokens": words, "rows": rows, "answers": compared, "html": html and html.resolve()}


def _two_answers(model: "Decoder", typed: str | None) -> tuple[str, str] | None:
    """Answers such as " Mary, John"; raises ValueError unless they are two different tokens."""
    from hooked_lm.engine.answers import right_and_wrong
    from hooked_lm.reports.circuit import answers_of

    if typed is None:
        return None
    [first], [second] = answers_of([typed])
    right_and_wrong(first, second, model)
    return first, second


def _compared(found: "Lens", right: str, wrong: str) -> dict[str, object]:
    """Prints and returns, for each position and layer, the logit difference of two answers and their probabilities."""
    from hooked_lm import viz
    from hooked_lm.reports.sweep import parts_of_position

    assert found.answers is not None, "they were asked for"
    logits, shares = (found.answers.select(metric=name).mean.tolist() for name in ("logit", "probability"))
    rows: list[dict[str, object]] = [
        {
            "position": parts_of_position(label)[0],
            "layer": layer,
            "logit_difference": logits[0][i][at] - logits[1][i][at],
            "probability": shares[0][i][at],
            "wrong_probability": shares[1][i][at],
        }
        for at, label in enumerate(found.axes["position"])
        for i, layer in enumerate(found.axes["layer"])
    ]
    say("The logit of the first answer minus that of the second, in nats, and the probabilities of both:")
    names = ("position", "layer", "difference", viz.visible(right), viz.visible(wrong))
    formats = {"difference": "+.2f", **dict.fromkeys(names[3:], ".3f")}
    show_table([dict(zip(names, row.values(), strict=True)) for row in reversed(rows)], formats)
    return {"answer": right, "wrong_answer": wrong, "rows": rows}


def _row(layer: object, group: "pd.DataFrame") -> dict[str, object]:
    """The tokens of one layer, the most likely first."""
    from hooked_lm import viz

    tokens = zip(group["token"], group["probability"], strict=True)
    shown = {
        str(n): "-" if share != share else f"{viz.visible(token)} {share:.2f}"  # NaN
        for n, (token, share) in enumerate(tokens, 1)
    }
    return {"layer": layer, **shown}
