"""Pairs of clean and corrupted prompts: given as one value, and resolved to what a model reads in both runs."""

from hooked_lm.engine.both_stacks import Target, joined
from hooked_lm.engine.prompts import Prompts, rows_of
from hooked_lm.hooks import HookedRootModule
from hooked_lm.models.encoder_decoder import EncoderDecoder
from hooked_lm.models.text.methods import TextMethods
from hooked_lm.models.vision.inputs import ImagesAndTexts, Rows, ids_of


def pair_of(
    model: HookedRootModule,
    corrupted: Prompts,
    clean: Prompts,
    name: str = "corrupted",
    reads_pairs: bool = False,
    same_length: bool = True,
) -> tuple[Rows, Rows]:
    """What the model reads of corrupted and of clean prompts, pair by pair.

    Raises as `rows_of`, and ValueError for another number of prompts or, with `same_length`, of tokens. `name` is that of the
    corrupted prompts in errors; `reads_pairs` as for `rows_of`.
    """
    rows = rows_of(model, corrupted, name, reads_pairs), rows_of(model, clean, "clean", reads_pairs)
    aligned(*rows, model, same_length)
    return rows


def both_runs(
    model: HookedRootModule,
    corrupted: Prompts,
    clean: Prompts | None,
    direction: str,
    decoder_input: Target = None,
    name: str = "corrupted",
    reads_pairs: bool = False,
) -> tuple[HookedRootModule, Rows, Rows | None]:
    """The model to run, what it reads in the run that is changed, and in the other one; raises as `pair_of`."""
    if direction not in ("denoise", "noise"):
        raise ValueError(f"direction must be 'denoise' or 'noise', got {direction!r}")
    first: Rows
    other: Rows | None
    if clean is not None:
        first, other = pair_of(model, corrupted, clean, name, reads_pairs)
    elif direction == "noise":
        raise ValueError("direction='noise' changes the clean run: give clean=...")
    else:
        first, other = rows_of(model, corrupted, name, reads_pairs), None
    if isinstance(model, EncoderDecoder):
        model, first, other = joined(model, ids_of(first), None if other is None else ids_of(other), decoder_input)
    elif decoder_input is not None:
        raise ValueError(f"decoder_input is for encoder-decoders, and this is a {type(model).__name__}")
    return (model, first, other) if direction == "denoise" or other is None else (model, other, first)


def aligned(corrupted: Rows, clean: Rows, model: HookedRootModule | TextMethods, same_length: bool = True) -> None:
    """Raises ValueError unless both have the same number of prompts and tokens; it shows where texts first differ."""
    if isinstance(corrupted, ImagesAndTexts) and len(ids_of(corrupted)) != len(ids_of(clean)):
        raise ValueError(
            f"clean and corrupted runs must have as many texts; they have {len(ids_of(clean))} and {len(ids_of(corrupted))}"
        )
    if not same_length and len(corrupted) != len(clean):
        raise ValueError(f"each corrupted prompt needs a clean one; there are {len(corrupted)} and {len(clean)}")
    if same_length and corrupted.shape != clean.shape:
        raise ValueError(
            f"clean and corrupted prompts must have the same shape (prompts, tokens); they have {tuple(clean.shape)} and "
            f"{tuple(corrupted.shape)}{_first_difference(corrupted, clean, model)}"
        )


def _first_difference(corrupted: Rows, clean: Rows, model: HookedRootModule | TextMethods, n_tokens: int = 6) -> str:
    """The tokens of the first prompts from where they differ, if there is a tokenizer."""
    both = [ids_of(rows)[0].tolist() for rows in (clean, corrupted)]
    if getattr(model, "tokenizer", None) is None or both[0] == both[1]:
        return ""
    at = next((i for i, (one, other) in enumerate(zip(*both, strict=False)) if one != other), min(map(len, both)))
    words = [[model.to_single_str_token(token) for token in ids[at : at + n_tokens]] for ids in both]
    shown = [f"{found}{' ...' * (len(ids) > at + n_tokens)}" for found, ids in zip(words, both, strict=True)]
    return f"; from position {at} on the clean tokens are {shown[0]}, and the corrupted ones {shown[1]}"
