"""The outputs of an encoder: each head runs if its output is requested or one of its hook points has a listener."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from hooked_lm.components.embeddings.embed import soft_capped
from hooked_lm.components.heads import SpanClassifier
from hooked_lm.hooks import HookedRootModule, HookPoint, is_listening
from hooked_lm.models.text.encoder import Text

RETURN_TYPES = ("logits", "predictions", "embeddings", "pooled", "nsp", None)
SEQUENTIAL = ("The sentences are sequential", "The sentences are NOT sequential")

Real = Bool[Tensor, "batch pos"]


def check_return_type(model: HookedRootModule, return_type: str | None) -> None:
    """Raises ValueError for an unknown return type, or one that needs a head that the model lacks."""
    if return_type not in RETURN_TYPES:
        known = ", ".join(map(repr, RETURN_TYPES))
        raise ValueError(f"return_type must be one of {known} (or 'output', the default), got {return_type!r}")
    lacks = {
        "logits": model.main_head is None,
        "predictions": model.main_head is None,
        "pooled": model.pooler is None,
        "nsp": model.nsp_head is None,
    }
    if return_type is not None and lacks.get(return_type):
        has = [name for name in RETURN_TYPES if name is not None and not lacks.get(name)]
        what = {"pooled": "a pooler", "nsp": "a next sentence head"}.get(return_type, "a head with logits")
        raise ValueError(
            f"return_type={return_type!r} needs {what}, which this checkpoint does not have; possible are {', '.join(has)}. "
            "A checkpoint of another transformers class may have one (BertForMaskedLM, BertForPreTraining, ...)"
        )


class EncoderOutputs:
    """The heads of a HookedEncoder, and their outputs."""

    stack: Any
    tree: Any
    mlm_head: Any
    unembed: Any
    pooler: Any
    nsp_head: Any
    classifier: Any
    token_classifier: Any
    contact_head: Any
    run_with_cache: Any
    _inputs: Any
    hf_config: dict[str, Any] | None
    tokens: Any

    @property
    def main_head(self) -> str | None:
        """The name of the head whose logits the model returns; None if it has none."""
        heads = ("unembed", "classifier", "token_classifier", "nsp_head")
        return next((name for name in heads if getattr(self, name) is not None), None)

    @property
    def main_return_type(self) -> str:
        """The default return type: "logits", or "embeddings" for a model without a head."""
        return "embeddings" if self.main_head is None else "logits"

    def _returned(
        self, stream: Float[Tensor, "batch pos d_model"], real: Real | None, tokens: Tensor, return_type: str | None
    ) -> Any:
        main = self.main_head if return_type in ("logits", "predictions") else None
        outputs: dict[str | None, Tensor] = {}
        if self.unembed is not None and (main == "unembed" or listening(self.mlm_head, self.unembed)):
            logits = self.unembed(stream if self.mlm_head is None else self.mlm_head(stream))
            outputs["unembed"] = soft_capped(logits, self.tree.unembed.soft_cap)
        runs = {name: main == name or listening(getattr(self, name)) for name in ("classifier", "nsp_head")}
        runs["nsp_head"] |= return_type == "nsp"
        if return_type == "pooled" or any(runs.values()) or listening(self.pooler):
            outputs["pooled"] = self.pooler(stream, real)
        for name in ("classifier", "nsp_head"):
            if runs[name]:
                outputs[name] = getattr(self, name)(outputs["pooled"])
        if main == "token_classifier" or listening(self.token_classifier):
            outputs["token_classifier"] = self.token_classifier(stream)
        if return_type == "predictions":
            return self._predictions(outputs[main], tokens, real)
        outputs["embeddings"] = stream
        return outputs[{"logits": main, "nsp": "nsp_head"}.get(return_type or "", return_type)] if return_type else None

    def _predictions(self, logits: Tensor, tokens: Int[Tensor, "batch pos"], real: Real | None) -> Any:
        """The most likely token for each mask token, or the label of the most likely class of each text or token.

        A single prediction is a string; several are a list, and for tokens a list of lists. Several mask tokens are
        numbered: "Prediction 0: cat", "Prediction 1: mat". A multi-label classifier gives the list of labels with a positive
        logit. ValueError for spans and for regression.
        """
        if self.main_head == "unembed":
            mask_token = getattr(self.tokens.need_tokenizer(), "mask_token_id", None)
            if mask_token is None:
                raise ValueError(
                    "return_type='predictions' needs a mask token, which this tokenizer lacks; use return_type='logits'"
                )
            masked = logits[tokens == mask_token]
            if not len(masked):
                raise ValueError(f"the input has no mask token to predict; write {self.tokens.tokenizer.mask_token!r}")
            found = [self.tokens.to_string(token[None]).strip() for token in masked.argmax(-1)]
            return found[0] if len(found) == 1 else [f"Prediction {i}: {word}" for i, word in enumerate(found)]
        if self.main_head == "nsp_head":
            return _one_or_all([SEQUENTIAL[int(i)] if len(row) == 2 else str(int(i)) for row, i in _choices(logits)])
        if isinstance(self.token_classifier, SpanClassifier):
            raise ValueError("return_type='predictions' does not support span classifiers: use return_type='logits'")
        if self.main_head == "classifier" and logits.shape[-1] == 1:
            raise ValueError("return_type='predictions' does not support regression: use return_type='logits'")
        if (self.hf_config or {}).get("problem_type") == "multi_label_classification":
            return _one_or_all([[self.label(int(i)) for i in (row > 0).nonzero()[..., 0]] for row in logits])
        if self.main_head == "classifier":
            return _one_or_all([self.label(int(i)) for _, i in _choices(logits)])
        # a single score per token (ELECTRA) is positive if the token was replaced
        classes = (logits > 0).long() if logits.ndim == 2 else logits.argmax(-1)
        rows = [row if real is None else row[real[i]] for i, row in enumerate(classes)]
        return _one_or_all([[self.label(int(i)) for i in row] for row in rows])

    def predict_contacts(
        self, input: Text | Tensor, attention_mask: Tensor | None = None
    ) -> Float[Tensor, "batch residue residue"]:
        """Returns the contact probability of each pair of residues of a protein; for models with a `contact_head` (ESM)."""
        if self.contact_head is None:
            raise ValueError("this checkpoint has no contact_head; ESM checkpoints have one")
        tokens, types, mask = self._inputs(input, None, attention_mask)
        given = {"return_type": None, "token_type_ids": types, "attention_mask": mask}
        _, cache = self.run_with_cache(tokens, names_filter="blocks.*.attn.hook_pattern", **given)
        return self.contact_head(torch.cat(list(cache.values()), 1), tokens, self.stack.real(self, mask, tokens))

    def label(self, index: int) -> str:
        """Returns the name of a class from the checkpoint's config, or its index."""
        labels = (self.hf_config or {}).get("id2label") or {}
        return str(labels.get(index, labels.get(str(index), index)))


def listening(*modules: nn.Module | None) -> bool:
    """Whether any hook point of these modules has a listener; None stands for an absent module."""
    points = [m for module in modules if module is not None for m in module.modules() if isinstance(m, HookPoint)]
    return is_listening(*points)


def _choices(logits: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(logits, logits.argmax(-1), strict=True))


def _one_or_all(found: Sequence[Any]) -> Any:
    return found[0] if len(found) == 1 else list(found)
