"""`generate`: a continuation, token by token, as the model writes it."""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from hooked_lm.cli.command import Result, command
from hooked_lm.cli.inputs import check_prompt, load
from hooked_lm.cli.options import ModelArgument, PromptArgument
from hooked_lm.cli.output import console


@command("hooked-lm generate demo 'The capital of France is' --max-new-tokens 4 --greedy")
def generate(
    model: ModelArgument,
    prompt: PromptArgument,
    max_new_tokens: Annotated[int, typer.Option(help="The length of the continuation, at most.")] = 40,
    greedy: Annotated[bool, typer.Option("--greedy/--sample", help="The most likely token each time.")] = False,
    temperature: Annotated[float, typer.Option(help="Of the distribution that is sampled.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Sample among this many tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample among tokens of this total probability.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the samples.")] = None,
    steer: Annotated[Path | None, typer.Option(help="Steering vectors that SteeringVectors.save wrote.")] = None,
    coefficient: Annotated[float, typer.Option(help="How far the vectors move activations.")] = 1.0,
    layer: Annotated[list[int] | None, typer.Option(help="Layers that are steered; the best one by default.")] = None,
) -> Result:
    """Continue a prompt, steered if you like.

    The text appears as it is generated.
    """
    from hooked_lm.interventions.steering import SteeringVectors
    from hooked_lm.models.decoder import Decoder
    from hooked_lm.models.encoder_decoder import EncoderDecoder

    vectors = None if steer is None else SteeringVectors.load(steer)
    loaded = load(model)
    if not isinstance(loaded, (Decoder, EncoderDecoder)):
        raise ValueError(f"{model} is a {type(loaded).__name__}, which generates no text")
    check_prompt(loaded, prompt)
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "do_sample": not greedy,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "verbose": False,
    }
    hooks = nullcontext() if vectors is None else loaded.hooks(vectors.hooks(coefficient, layer))
    with hooks:
        if isinstance(loaded, EncoderDecoder):
            text = str(loaded.generate(prompt, **options))
            _write(text)
        else:
            text = ""
            for piece in loaded.generate_stream(prompt, max_tokens_per_yield=1, **options):
                _write(str(piece))
                text += str(piece)
    _write("\n")
    return {"model": model, "prompt": prompt, "text": text, "seed": seed, "steer": steer}


def _write(text: str) -> None:
    """To the terminal at once, without line breaks of its own."""
    if not console.quiet:
        console.file.write(text)
        console.file.flush()
