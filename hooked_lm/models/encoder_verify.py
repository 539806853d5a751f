"""Do the sites of an encoder mean what they promise?"""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from hooked_lm.components.identities import Identity, Sites, below, norm_identity, normed
from hooked_lm.models.verify import Check, Errors, Verification, error_of, last_site, run_recorded


@torch.no_grad()
def verify(model: Any, tokens: Int[Tensor, "batch pos"] | None = None) -> Verification:
    """Check the identities between the sites of a HookedEncoder on one run, over random tokens unless given.

    Errors and tolerances are those of `hooked_lm.models.verify`.
    """
    if tokens is None:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(model.cfg.d_vocab, (2, min(12, model.cfg.n_ctx)), generator=generator)
    tokens = tokens.to(model.device)
    plain = [name for name, point in model.hook_dict.items() if not point.on_demand or name.endswith("hook_result")]
    output, sites, fired = run_recorded(model, (tokens,), plain)
    with_copies, _, fired_then = run_recorded(model, (tokens,), [name for name in model.hook_dict if name not in plain])
    errors: Errors = {"output == output with sites on demand": [error_of(lambda: (with_copies, output))]}
    for name, pair in _identities(model, sites.__getitem__, output):
        errors.setdefault(name, []).append(error_of(pair))
    tolerance = max(1e-5, 4 * torch.finfo(output.dtype).eps)
    wrong = sum((fired + fired_then)[name] != 1 for name in model.hook_dict)
    checks = [Check(name, tuple(found), tolerance) for name, found in errors.items()]
    return Verification((Check("sites that do not fire once", (float(wrong),), 0.0), *checks))


def _identities(model: Any, at: Sites, output: Tensor) -> Iterator[Identity]:
    yield "full_embed == first resid_pre", lambda: (at("hook_full_embed"), at("blocks.0.hook_resid_pre"))
    if "embed.ln.hook_normalized" in model.hook_dict and model.cfg.tree.embed.d_model is None:
        yield (
            "embed.ln.normalized * w + b == full_embed",
            lambda: (
                normed(model.embed.ln, below(at, "embed.ln"), lambda: output),
                at("hook_full_embed"),
            ),
        )
    for layer, block in enumerate(model.blocks):
        yield from block.identities(below(at, f"blocks.{layer}"))
        if layer + 1 < len(model.blocks):
            left, then = last_site(block, layer), f"blocks.{layer + 1}.hook_resid_pre"
            yield "resid_post == next resid_pre", lambda left=left, then=then: (at(left), at(then))
    last = last_site(model.blocks[-1], len(model.blocks) - 1)

    def left() -> Tensor:
        return at(last)

    def read() -> Tensor:
        return normed(model.ln_final, below(at, "ln_final"), left)

    yield from norm_identity("ln_final", model.ln_final, below(at, "ln_final"), left)
    yield from _head_identities(model, at, read, output)


def _head_identities(model: Any, at: Sites, read: Any, output: Tensor) -> Iterator[Identity]:
    head, pooler = model.mlm_head, model.pooler
    if model.unembed is not None and head is None:
        yield "unembed(ln_final(resid_post)) == logits", lambda: (model.unembed.plain(read()), output)
    elif model.unembed is not None:

        def read_by_unembed() -> Tensor:
            return normed(head.ln, below(at, "mlm_head.ln"), lambda: head.act(at("mlm_head.hook_pre")))

        yield "embeddings W + b == mlm_head.pre", lambda: (_linear(read(), head), at("mlm_head.hook_pre"))
        yield "unembed(mlm_head) == logits", lambda: (model.unembed.plain(read_by_unembed()), output)
    elif model.classifier is None and model.nsp_head is None:
        yield "ln_final(resid_post) == output", lambda: (read(), output)
    if pooler is not None and pooler.cfg.ln is None and not pooler.cfg.mean:
        yield (
            "act(first token W + b) == pooler_out",
            lambda: (
                pooler.act(_linear(read()[:, 0], pooler)),
                at("pooler.hook_pooler_out"),
            ),
        )
    for name, module, site in (
        ("nsp_head", model.nsp_head, "hook_nsp_out"),
        ("classifier", model.classifier, "hook_out"),
    ):
        if module is not None and not module.cfg.per_token and pooler is not None:
            yield (
                f"pooler_out W + b == {name}",
                lambda name=name, module=module, site=site: (
                    _linear(at("pooler.hook_pooler_out"), module),
                    at(f"{name}.{site}"),
                ),
            )


def _linear(x: Tensor, module: Any) -> Tensor:
    return x @ module.W if module.b is None else x @ module.W + module.b
