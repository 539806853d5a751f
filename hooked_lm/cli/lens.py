"""`lens`: what a model would say after each layer."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from hooked_lm.cli.command import Result, command
from hooked_lm.cli.inputs import check_readable, check_writable, decoder, integers
from hooked_lm.cli.options import ModelArgument, PromptArgument
from hooked_lm.cli.output import cells, records, say, say_path, show_table
from hooked_lm.cli.prompts_and_sites import prompt_of, short_name

if TYPE_CHECKING:
    import pandas as pd

    from hooked_lm.analysis.reading.lens import Translator
    from hooked_lm.models.decoder import Decoder
    from hooked_lm.results import Scores


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
    lens: Annotated[
        Path | None,
        typer.Option(help="A file of a TunedLens or a JacobianLens, or a published lens (.pt, .safetensors)."),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Also write the grid of all positions to this page.")] = None,
) -> Result:
    """Show the likely next tokens after each layer, and compare two answers.

    The residual stream is decoded by the final norm and the unembedding (the logit lens), with --lens after a map that was
    fitted. The last layer comes first: its tokens are those that the model says.
    """
    from hooked_lm import analysis, viz
    from hooked_lm.engine.answers import right_and_wrong
    from hooked_lm.reports.circuit import answers_of

    check_writable(html)
    loaded = decoder(model, "lens")
    translator = None if lens is None else _translator(lens, loaded)
    given, words = prompt_of(loaded, prompt)
    places, site = integers("positions", positions), short_name(site)
    pair = None if answers is None else [side for [side] in answers_of([answers])]
    if pair is not None:
        right_and_wrong(pair[0], pair[1], loaded)  # raises for two that are the same
    found = analysis.logit_lens(
        loaded, given, site=site, k=k, positions=places, answers=pair and [pair], lens=translator
    )
    table = found.to_dataframe()
    for place, (_, part) in zip(places, table.groupby("position", sort=False), strict=True):
        say(f"The next token after {escape(viz.visible(words[place]))}, with its probability:")
        show_table([_row(layer, group) for layer, group in reversed(list(part.groupby("layer", sort=False)))])
    compared = None if found.answers is None else _compare(found.answers)
    if html is not None:
        grid = analysis.logit_lens(loaded, given, site=site, k=k, lens=translator)
        name = str(grid.about["lens"])
        viz.write_html(grid.plot(title=f"{name[0].upper()}{name[1:]}: {prompt}"), html)
        say_path("page:", html)
    columns = ["position", "layer", "rank", "token", "id", "logit", "probability"]
    return {
        "model": model,
        "lens": found.about["lens"],
        "tokens": words,
        "rows": cells(table[columns]),
        "answers": compared,
        "html": html and html.resolve(),
    }


def _translator(path: Path, model: "Decoder") -> "Translator":
    """The lens in a file; ValueError for something else."""
    from hooked_lm.analysis import JacobianLens
    from hooked_lm.analysis.reading.lens import Translator
    from hooked_lm.analysis.reading.published_lenses import is_published
    from hooked_lm.saved import load

    check_readable(path, "a lens, as TunedLens.save and JacobianLens.save write them")
    if is_published(path):
        return JacobianLens.from_published(path, model)
    found = load(path)
    if not isinstance(found, Translator):
        raise ValueError(f"{path} holds a {type(found).__name__}, which is no TunedLens and no JacobianLens")
    return found


def _compare(found: "Scores") -> list[dict[str, object]]:
    """Prints and returns, for each layer and position, the logit difference of two answers and their probabilities."""
    from hooked_lm.reports.sweep import readable

    logits, shares = (found.select(metric=name).mean.flatten(1).numpy() for name in ("logit", "probability"))
    table = found.select(metric="logit", answer=0).to_dataframe()[["layer", "position"]]
    table = table.assign(logit_difference=logits[0] - logits[1], probability=shares[0], wrong_probability=shares[1])
    say("The logit of the right answer minus that of the wrong one, in nats, and their probabilities:")
    show_table(
        records(readable(table[::-1])), {"logit_difference": "+.2f", "probability": ".3f", "wrong_probability": ".3f"}
    )
    return cells(table)


def _row(layer: object, group: "pd.DataFrame") -> dict[str, object]:
    """The tokens of one layer, the most likely first."""
    from hooked_lm import viz

    tokens = zip(group["token"], group["probability"], strict=True)
    shown = {
        str(n): "-" if share != share else f"{viz.visible(token)} {share:.2f}"  # NaN
        for n, (token, share) in enumerate(tokens, 1)
    }
    return {"layer": layer, **shown}
