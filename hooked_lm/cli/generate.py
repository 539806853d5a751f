"""`generate`: a continuation, token by token, as the model writes it."""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hooked_lm.cli.command import Result, command
from hooked_lm.cli.inputs import check_readable, load
from hooked_lm.cli.options import ModelArgument, PromptArgument
from hooked_lm.cli.output import console, to_stderr
from hooked_lm.cli.prompts_and_sites import prompt_of

if TYPE_CHECKING:
    from hooked_lm.interventions.steering import SteeringVectors


@command("hooked-lm generate demo 'The capital of France is' --max-new-tokens 4 --greedy")
def generate(
    model: ModelArgument,
    prompt: PromptArgument,
    max_new_tokens: Annotated[int, typer.Option(help="The length of the continuation, at most.")] = 40,
    greedy: Annotated[bool, typer.Option("--greedy/--sample", help="Take the most likely token each time.")] = False,
    temperature: Annotated[float | None, typer.Option(help="The temperature of sampling; 1 by default.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample among this many tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample among tokens of this total probability.")] = None,
    seed: Annotated[int | None, typer.Option(help="The seed of sampling.")] = None,
    steer: Annotated[Path | None, typer.Option(help="A file that SteeringVectors.save wrote.")] = None,
    coefficient: Annotated[
        float | None, typer.Option(help="How far the vectors move activations; 1 by default.")
    ] = None,
    dose: Annotated[
        float | None, typer.Option(help="In place of a coefficient: how far, in norms of the activations; 0.5 is much.")
    ] = None,
    layer: Annotated[list[int] | None, typer.Option(help="Layers that are steered; the best one by default.")] = None,
) -> Result:
    """Continue a prompt, or answer in a conversation, with or without steering.

    The text of a prompt appears as it is generated.
    """
    _check(greedy, max_new_tokens, {"--temperature": temperature, "--top-k": top_k, "--top-p": top_p})
    if steer is not None:
        check_readable(steer, "steering vectors, as SteeringVectors.save writes them")
    elif coefficient is not None or dose is not None or layer:
        raise ValueError("--coefficient, --dose and --layer are of steering vectors: give these with --steer")
    from hooked_lm.interventions.steering import SteeringVectors
    from hooked_lm.models.text.chat import Chat

    vectors = None if steer is None else SteeringVectors.load(steer)
    loaded = load(model)
    if not hasattr(loaded, "generate"):
        raise ValueError(f"{model} is a {type(loaded).__name__}, which generates no text")
    start, _ = prompt_of(loaded, prompt)
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "do_sample": not greedy,
        "temperature": 1.0 if temperature is None else temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "verbose": False,
    }
    hooks = None if vectors is None else vectors.hooks(coefficient, layer, dose=dose)
    if vectors is not None and not layer:
        to_stderr(_why(vectors))
    with nullcontext() if hooks is None else loaded.hooks(hooks):
        if isinstance(start, Chat):
            pieces = iter([start.reply(loaded, **options).of({"turn": len(start.messages[0])})])
        elif not isinstance(start, str):  # ids of a model without a tokenizer
            ids = loaded.generate(start, stop_at_eos=False, **options)
            pieces = iter([",".join(map(str, ids[0].tolist()))])
        elif hasattr(loaded, "generate_stream"):
            pieces = map(str, loaded.generate_stream(start, max_tokens_per_yield=1, **options))
        else:
            pieces = iter([str(loaded.generate(start, **options))])
        text = ""
        for piece in pieces:
            _write(piece)
            text += piece
    _write("\n")
    layers = None if hooks is None else [hook.layer for hook in hooks]
    return {"model": model, "prompt": prompt, "text": text, "seed": seed, "steer": steer, "layers": layers}


def _why(vectors: "SteeringVectors") -> str:
    """The layer that is steered by default, and why."""
    best, equal = vectors.best_layer(), vectors.best_layers()
    which = f"the middle one of the layers {', '.join(map(str, equal))}" if len(equal) > 1 else "the layer"
    return f"steered at layer {best}, {which} that separate{'s' * (len(equal) == 1)} held-out pairs best; --layer chooses others"


def _check(greedy: bool, max_new_tokens: int, of_samples: dict[str, float | None]) -> None:
    """Raises ValueError for a negative length, and for options of samples where none are drawn."""
    if max_new_tokens < 0:
        raise ValueError(f"--max-new-tokens must be 0 or more, got {max_new_tokens}")
    if greedy and (given := [name for name, value in of_samples.items() if value is not None]):
        raise ValueError(f"--greedy draws no samples, so {' and '.join(given)} would change nothing: leave one out")


def _write(text: str) -> None:
    """To the terminal at once, without line breaks of its own."""
    if not console.quiet:
        console.file.write(text)
        console.file.flush()
