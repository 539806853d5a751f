"""What identifies a prompt, so that a result knows which prompts it is of."""

from hooked_lm.engine.fingerprint import Digest
from hooked_lm.engine.prompts import some_rows
from hooked_lm.hooks import HookedRootModule
from hooked_lm.models.vision.inputs import Rows, VisionInputs, ids_of

LENGTH = 16  # hexadecimal digits of a digest
PROMPTS = "prompts"  # in `about`: the identities of the prompts that a result is of


def identities(model: HookedRootModule, rows: Rows) -> list[str]:
    """A digest of each prompt: of its token ids, and of its images if it has some.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> one, other, again = identities(
    ...     model, model.to_tokens(["Mary left", "John left", "Mary left"])
    ... )
    >>> one == again != other
    True
    """
    return [_digest(some_rows(model, rows, [row])) for row in range(len(rows))]


def _digest(row: Rows) -> str:
    images = dict(row.images) if isinstance(row, VisionInputs) else {}
    return Digest().of((ids_of(row).tolist(), images)).hex()[:LENGTH]
