"""`demo`: patch the bundled model, and write a report."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from hooked_lm.cli.command import Result, command
from hooked_lm.cli.inputs import check_writable
from hooked_lm.cli.output import records, result_data, say, say_path, show_table

if TYPE_CHECKING:
    from hooked_lm.demo import experiment
    from hooked_lm.pretrained import HookedTransformer


@command("hooked-lm demo --output hooked_lm_demo.html")
def demo(
    output: Annotated[Path, typer.Option("--output", "--out", help="The path of the report.")] = Path(
        "hooked_lm_demo.html"
    ),
    n_pairs: Annotated[int, typer.Option(help="The number of prompt pairs.")] = 8,
    open_report: Annotated[bool, typer.Option("--open/--no-open", help="Show the report in a browser.")] = False,
) -> Result:
    """Patch the bundled model, and write a report.

    The task is the indirect object: When Mary and John went to the store, John gave a drink to ...
    """
    check_writable(output)
    start = time.perf_counter()

    from hooked_lm.demo import experiment
    from hooked_lm.pretrained import HookedTransformer

    pairs = experiment.prompt_pairs(n_pairs)
    model = HookedTransformer.from_pretrained("demo")
    _show_setting(model, pairs[0])
    result = experiment.run(model, pairs)
    clean, corrupted = result.differences.mean.tolist()
    _show_result(result, clean, corrupted)
    table = result.heads.to_dataframe().rename(columns={"mean": "restored"})
    path = experiment.write_report(result, output).resolve()
    seconds = time.perf_counter() - start
    say_path("report:", path, f"  ({seconds:.1f} s)")
    if open_report:
        typer.launch(path.as_uri())
    return {
        "n_pairs": len(pairs),
        "logit_difference": {"clean": clean, "corrupted": corrupted},
        "heads": result_data(_heads(result), table, result.heads.axes),
        "report": path,
        "seconds": seconds,
    }


def _show_setting(model: "HookedTransformer", pair: "experiment.PromptPair") -> None:
    cfg, size = model.cfg, sum(parameter.numel() for parameter in model.parameters()) / 1e6
    say(
        f"[bold]model[/]      {cfg.n_layers} layers, {cfg.n_heads} heads, d_model {cfg.d_model}, {size:.2f} M parameters"
    )
    say(f"[bold]clean[/]      {escape(pair.clean)}[green]{escape(pair.answer)}[/]")
    say(f"[bold]corrupted[/]  {escape(pair.corrupted)}[red]{escape(pair.wrong_answer)}[/]")


def _show_result(result: "experiment.Result", clean: float, corrupted: float) -> None:
    intervals = ", with 95% intervals of all heads at once" if len(result.pairs) > 1 else ""
    say(
        f"\n[bold]logit difference[/] over {len(result.pairs)} pairs of prompts: clean {clean:+.2f}, corrupted {corrupted:+.2f}"
        f"\n[bold]heads[/] by the effect of patching their output (0: corrupted, 1: clean){intervals};"
        '\n"acts at": the position at which it has most of this effect; tokens and positions of the first prompt:'
    )
    show_table(
        records(result.ranking().drop(columns="restored there")),
        {"restored": "+.3f", "low": "+.3f", "high": "+.3f", "weight": ".2f"},
    )
    say(f"[bold]patched[/]    {result.work}")


def _heads(result: "experiment.Result") -> list[dict[str, object]]:
    """The ranking, with positions as numbers."""
    ranking = result.ranking()
    acting = [result.acting(head) for head in ranking["head"]]
    effects = records(ranking[[name for name in ("head", "restored", "low", "high") if name in ranking]])
    return [
        {
            **row,
            "position": each.position,
            "token": result.tokens[each.position],
            "restored_there": each.effect,
            "looks_at": each.looks_at,
            "looks_at_token": result.tokens[each.looks_at],
            "weight": each.weight,
        }
        for row, each in zip(effects, acting, strict=True)
    ]
