"""HookedEncoder: an encoder that reads a text both ways; tokens in, logits or embeddings out."""

import os
from copy import copy
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooked_lm.components.context import Context
from hooked_lm.components.heads import first_token
from hooked_lm.components.norm import build_norm
from hooked_lm.components.source import StackContext
from hooked_lm.hooks import Cache, HookedRootModule, HookPoint, is_listening
from hooked_lm.models.activation_cache import ActivationCache
from hooked_lm.models.checks import check_length
from hooked_lm.models.decoder import ON_DEMAND_FLAGS, Mask
from hooked_lm.models.encoder_config import EncoderConfig, HookedEncoderConfig
from hooked_lm.models.encoder_text import EncoderText, Texts
from hooked_lm.models.encoder_verify import verify
from hooked_lm.models.encoder_views import EncoderViews
from hooked_lm.models.init import init_weights
from hooked_lm.models.names import aliases, site_name
from hooked_lm.models.verify import Verification

Input = Texts | Int[Tensor, "*batch pos"]
Types = Int[Tensor, "batch pos"]
RETURN_TYPES = ("output", "logits", "predictions", "embeddings", "pooled", "nsp", None)


class HookedEncoder(EncoderText, EncoderViews, HookedRootModule):
    """An encoder (BERT and its kin) in which every intermediate value has a name.

    `HookedEncoder.from_pretrained(name)` loads a checkpoint with the heads that it has; `HookedEncoder(cfg)` builds a new
    BERT from a `HookedEncoderConfig` (or a dict of its flat names).

    >>> import torch
    >>> from hooked_lm.models.encoder import HookedEncoder
    >>> model = HookedEncoder(dict(n_layers=2, d_model=16, n_heads=2, n_ctx=8, d_vocab=10, act_fn="gelu"))
    >>> logits, cache = model.run_with_cache(torch.tensor([[5, 3, 1]]))
    >>> logits.shape, cache["pattern", 1].shape, cache["pooler.hook_pooler_out"].shape
    (torch.Size([1, 3, 10]), torch.Size([1, 2, 3, 3]), torch.Size([1, 16]))
    """

    hf_config: dict[str, Any] | None = None  # of the checkpoint that it was loaded from

    def __init__(
        self,
        cfg: HookedEncoderConfig | dict[str, Any],
        tokenizer: Any = None,
        move_to_device: bool = True,
    ) -> None:
        super().__init__()
        self.cfg = copy(HookedEncoderConfig.unwrap(cfg))  # type: ignore[assignment]  # the caller's may build others
        self.set_tokenizer(tokenizer)
        self.cfg.check_tree()
        with torch.device(self.cfg.device if move_to_device else torch.get_default_device()):
            self._make(self.tree)
        if self.embed.W_E.dtype != self.cfg.dtype:
            super().to(self.cfg.dtype)
        if self.cfg.init_weights:
            self.init_weights()
        self.setup()

    def _make(self, tree: EncoderConfig) -> None:
        self.hook_tokens = HookPoint("batch", "pos", on_demand=True)
        self.embed = tree.embed.build()
        self.hook_full_embed = HookPoint("batch", "pos", "d_model")
        self.rel_pos_bias = None if tree.rel_pos_bias is None else tree.rel_pos_bias.build()
        self.blocks = nn.ModuleList(block.build(layer) for layer, block in enumerate(tree.blocks))
        for layer, owner in enumerate(tree.shares or ()):
            _share(self.blocks[layer], self.blocks[owner])
        self.ln_final = build_norm(tree.ln_final)
        self.mlm_head = None if tree.mlm_head is None else tree.mlm_head.build()
        self.unembed = None if tree.unembed is None else tree.unembed.build(self.embed.embed)
        if tree.unembed is not None and tree.unembed.tied:
            self.unembed.tied_to = "embed.embed.W_E"
        self.pooler = None if tree.pooler is None else tree.pooler.build()
        self.nsp_head = None if tree.nsp_head is None else tree.nsp_head.build()
        self.classifier = None if tree.classifier is None else tree.classifier.build()

    # ---- forward -----------------------------------------------------------------------------------------------------

    def forward(
        self,
        input: Input,
        return_type: str | None = "output",
        token_type_ids: Types | None = None,
        one_zero_attention_mask: Mask | None = None,
        *,
        attention_mask: Mask | None = None,
    ) -> Any:
        """Run the model on texts, pairs of texts, or token ids [batch, pos] or [pos].

        Args:
            return_type: "logits" of the head that the model has: of masked tokens [batch, pos, d_vocab], else of classes
                [batch, label] or [batch, pos, label], else of next sentences; "nsp" the last in any case, [batch, 2];
                "predictions" what these say, in words; "embeddings" of all tokens [batch, pos, d_model]; "pooled" one of
                each text [batch, d_model]; "output" the logits, or, in a model without a head, the embeddings; None.
            token_type_ids: [batch, pos], 0 for the first text of a pair and 1 for the second; 0 if not given.
            one_zero_attention_mask, attention_mask: two names of one thing: [batch, pos], 1 for real tokens, 0 for padding.

        Raises ValueError for an input that is empty or longer than n_ctx, for token ids out of range, and for a
        `return_type` whose head the model does not have.
        """
        kind = self._return_type(return_type)
        if one_zero_attention_mask is not None and attention_mask is not None:
            raise ValueError("one_zero_attention_mask and attention_mask are two names of one argument: give one")
        mask = one_zero_attention_mask if attention_mask is None else attention_mask
        tokens, types, mask = self._inputs(input, token_type_ids, mask)
        resid, context = self.encode(tokens, types, mask)
        found = self._heads(resid, context, kind)
        return self._predictions(found["logits"], tokens) if kind == "predictions" else found.get(kind)

    def encode(self, tokens: Tensor, types: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Context]:
        """The embeddings of all tokens, and what all layers share."""
        check_length(tokens, 0, self.cfg.n_ctx)
        real = None if mask is None else mask.to(self.device).bool()
        if real is not None and not torch.compiler.is_compiling() and bool(real.all()):
            real = None
        context = StackContext(tokens.shape[0], tokens.shape[1], self.device, real)
        tokens = self.hook_tokens(tokens)
        if not torch.compiler.is_compiling():
            self.tokens.check_ids(tokens)
        resid = self.hook_full_embed(self.embed(tokens, None if types is None else types.to(self.device), context))
        if self.rel_pos_bias is not None:
            context.score_bias = self.rel_pos_bias.bias(context, resid.dtype)
        for block in self.blocks:
            resid = block(resid, context)
        return self.ln_final(resid), context

    def _heads(self, resid: Tensor, context: Context, kind: str | None) -> dict[str | None, Any]:
        """What the heads give: those that are asked for, and those that somebody listens to."""
        found: dict[str | None, Any] = {"embeddings": resid}
        logits_of = self._logits_head()
        asked = logits_of if kind in ("logits", "predictions") else None
        if self.unembed is not None and (asked is self.unembed or _listens(self.mlm_head, self.unembed)):
            found["mlm"] = self.unembed(resid if self.mlm_head is None else self.mlm_head(resid))
        heads = {"classes": self.classifier, "nsp": self.nsp_head}
        wanted = {name: head for name, head in heads.items() if head is not None and (head is asked or name == kind)}
        wanted |= {name: head for name, head in heads.items() if _listens(head)}
        reads_pooled = any(not head.cfg.per_token for head in wanted.values())
        if self.pooler is not None and (kind == "pooled" or reads_pooled or _listens(self.pooler)):
            found["pooled"] = self.pooler(resid, context.real)
        pooled = found.get("pooled")
        if pooled is None and reads_pooled:
            pooled = first_token(resid, context.real)
        for name, head in wanted.items():
            found[name] = head(resid if head.cfg.per_token else pooled)
        names = {id(self.unembed): "mlm", id(self.classifier): "classes", id(self.nsp_head): "nsp"}
        if logits_of is not None:
            found["logits"] = found.get(names[id(logits_of)])
        return found

    def _logits_head(self) -> nn.Module | None:
        heads = (self.unembed, self.classifier, self.nsp_head)
        return next((head for head in heads if head is not None), None)

    def _return_type(self, return_type: str | None) -> str | None:
        """What is asked for; raises ValueError if the model cannot give it."""
        if return_type not in RETURN_TYPES:
            raise ValueError(f"return_type must be one of {RETURN_TYPES}, got {return_type!r}")
        if return_type == "output":
            return "embeddings" if self._logits_head() is None else "logits"
        needs = {"logits": self._logits_head(), "predictions": self._logits_head()}
        needs |= {"nsp": self.nsp_head, "pooled": self.pooler}
        if return_type in needs and needs[return_type] is None:
            heads = ("mlm_head", "classifier", "nsp_head", "pooler")
            there = [name for name in heads if getattr(self, name) is not None]
            raise ValueError(
                f"return_type={return_type!r} needs a head that this model does not have; it has "
                f"{', '.join(there) or 'none'}: 'embeddings' can always be had"
            )
        return return_type

    def _predictions(self, logits: Tensor, tokens: Tensor) -> str | list[str]:
        """In words: what stands at masked tokens, whether the second text follows the first, or the class."""
        tokenizer, names = self.tokens.need_tokenizer(), (self.hf_config or {}).get("id2label") or {}
        if self.unembed is not None:
            best = logits.argmax(-1)
            texts = [
                tokenizer.decode(row[ids == tokenizer.mask_token_id]) for row, ids in zip(best, tokens, strict=True)
            ]
        elif self.classifier is not None:
            labels = logits.argmax(-1).tolist()
            texts = [str(names.get(label, label) if isinstance(label, int) else label) for label in labels]
        else:
            follows = {0: "The second text follows the first", 1: "The second text does not follow the first"}
            texts = [follows[label] for label in logits.argmax(-1).tolist()]
        return texts[0] if len(texts) == 1 else texts

    def make_cache(self, cache_dict: dict[str, Tensor], has_batch_dim: bool) -> Cache:
        """An ActivationCache of this model."""
        return ActivationCache(cache_dict, self, has_batch_dim)

    # ---- sites -------------------------------------------------------------------------------------------------------

    def setup(self) -> None:
        """Name the hook points, and the names that other libraries have for them."""
        super().setup()
        self.aliases = aliases(self.hook_dict, self.cfg.n_layers)

    def site_name(self, site: Any) -> str:
        """The full name of a site given as "z5" or ("z", 5); negative layers count from the end."""
        return site_name(site, self.cfg.n_layers)

    def in_bare_cache(self, point: HookPoint) -> bool:
        """Whether a cache without a filter keeps this point: all but those on demand, unless a flag asks for them."""
        flag = ON_DEMAND_FLAGS.get((point.name or "").rpartition(".")[2])
        return not point.on_demand or (flag is not None and getattr(self.cfg, flag))

    def verify(self, tokens: Int[Tensor, "batch pos"] | None = None) -> Verification:
        """Check the identities between this model's sites; see `hooked_lm.models.encoder_verify`."""
        return verify(self, tokens)

    # ---- device and weights ------------------------------------------------------------------------------------------

    @property
    def tree(self) -> EncoderConfig:
        """What the model is made of."""
        assert self.cfg.tree is not None  # made with the config
        return self.cfg.tree

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where the weights are."""
        return self.embed.W_E.device

    def to(self, *args: Any, print_details: bool = True, **kwargs: Any) -> "HookedEncoder":
        """Move the model, as `nn.Module.to` does; `cfg.device` and `cfg.dtype` follow."""
        super().to(*args, **kwargs)
        self.cfg.device, self.cfg.dtype = str(self.device), self.embed.W_E.dtype
        return self

    def cuda(self, device: Any = None) -> "HookedEncoder":
        """Move the model to a CUDA device."""
        return self.to("cuda" if device is None else torch.device("cuda", device))

    def cpu(self) -> "HookedEncoder":
        """Move the model to the CPU."""
        return self.to("cpu")

    def mps(self) -> "HookedEncoder":
        """Move the model to an Apple GPU."""
        return self.to("mps")

    def init_weights(self) -> None:
        """Fill the weights with random numbers as `cfg.init_mode` says, from `cfg.seed` if there is one."""
        init_weights(self, self.cfg)

    # ---- loading -----------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(cls, model_name: str | os.PathLike[str], **kwargs: Any) -> "HookedEncoder":
        """A model from a hub id or a local directory, with the weights as they are; see `hooked_lm.hub`."""
        from hooked_lm import hub

        return hub.from_pretrained_no_processing(model_name, cls=cls, **kwargs)

    from_pretrained_no_processing = from_pretrained

    def to_hf(self) -> Any:
        """This model as a transformers model, bit for bit; see `hooked_lm.hub.to_hf`."""
        from hooked_lm import hub

        return hub.to_hf(self)

    def save_pretrained(self, path: str | os.PathLike[str]) -> None:
        """Write this model to a directory in HF format; see `hooked_lm.hub.save_pretrained`."""
        from hooked_lm import hub

        hub.save_pretrained(self, path)


def _listens(*modules: nn.Module | None) -> bool:
    """Whether somebody listens to a point of these."""
    points = [part for m in modules if m is not None for part in m.modules() if isinstance(part, HookPoint)]
    return bool(points) and is_listening(*points)


def _share(module: nn.Module, owner: nn.Module) -> None:
    """Give a module the parameters of another one of its kind."""
    if module is owner:
        return
    for name, parameter in owner.named_parameters():
        path, _, leaf = name.rpartition(".")
        module.get_submodule(path)._parameters[leaf] = parameter
