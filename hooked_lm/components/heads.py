"""The heads of encoders, whose input is the final residual stream.

`MLMHead` transforms each position before the unembedding. `Pooler` computes one vector per text, the input of `NSPHead` and
`Classifier`; `EndToken` and `LastToken` take one to compare with images. The input of `TokenClassifier` is each position, that of
`ContactHead` the attention patterns.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from hooked_lm.components.activations import Activated, Activation, activation
from hooked_lm.components.norms.norm import NormConfig, add_norm, norm_of, norm_unhooked
from hooked_lm.components.readable import is_readable
from hooked_lm.hooks import HookPoint

Stream = Float[Tensor, "batch pos d_model"]
Pooled = Float[Tensor, "batch d_model"]
Real = Bool[Tensor, "batch pos"]


class MLMHead(Activated):
    """`ln(act(x W + b))`, with `W` [d_model, d_out].

    `unread_bias` is the length of `b_unread`, a bias that the checkpoint has and the model does not use.
    """

    axes = {"W": "[d_model] d_out", "b_unread": "unread"}

    @dataclass(frozen=True)
    class Config:
        d_model: int
        d_out: int
        act_fn: Activation = "gelu"
        norm: NormConfig | None = None
        bias: bool = True
        unread_bias: int | None = None

        def build(self) -> "MLMHead":
            return MLMHead(self)

    def __init__(self, cfg: Config, width: str | None = None) -> None:
        super().__init__()
        self.cfg = cfg
        dims = ("batch", "pos", width or ("d_model" if cfg.d_out == cfg.d_model else "d_out"))
        self.W = nn.Parameter(torch.empty(cfg.d_model, cfg.d_out))
        self.b = nn.Parameter(torch.zeros(cfg.d_out)) if cfg.bias else None
        self.b_unread = None if cfg.unread_bias is None else nn.Parameter(torch.zeros(cfg.unread_bias))
        self.hook_pre = HookPoint(*dims)
        self.act_fn = activation(cfg.act_fn)
        self.hook_post = HookPoint(*dims)
        add_norm(self, "ln", cfg.norm, dims)

    def forward(self, resid: Stream) -> Float[Tensor, "batch pos d_out"]:
        post = self.hook_post(self.act_fn(self.hook_pre(F.linear(self.hidden(resid), self.W.T, self.b))))
        return norm_of(self, "ln")(post)

    def hidden(self, resid: Stream) -> Float[Tensor, "batch pos d_in"]:
        """What `W` reads, for the input of the head."""
        return resid

    def unhooked(self, resid: Stream) -> Float[Tensor, "batch pos d_out"]:
        """The same, without the hook points."""
        return norm_unhooked(norm_of(self, "ln"), self.act_fn(F.linear(resid, self.W.T, self.b)))


class TwoLayerMLMHead(MLMHead):
    """An `MLMHead` after another one, `inner`, of width `d_inner` and without a norm."""

    axes = {"W": "[d_inner] d_out"}

    @dataclass(frozen=True)
    class Config(MLMHead.Config):
        d_inner: int = field(kw_only=True)

        def build(self) -> "TwoLayerMLMHead":
            return TwoLayerMLMHead(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        self.W = nn.Parameter(torch.empty(cfg.d_inner, cfg.d_out))
        after = list(self._modules)
        self.inner = MLMHead(MLMHead.Config(cfg.d_model, cfg.d_inner, cfg.act_fn, bias=cfg.bias), "d_inner")
        for name in after:
            self._modules[name] = self._modules.pop(name)

    def hidden(self, resid: Stream) -> Float[Tensor, "batch pos d_inner"]:
        return self.inner(resid)


class Pooler(nn.Module):
    """`ln(act(x W + b))`, where x is a text's first token, or with `mean` the mean of its real tokens.

    With `pools_last` `act(x W + b)` is computed for each token, before the first is taken or the mean. With `unread` the
    checkpoint has another pooler, `W_unread` and `b_unread`, which the model does not use.
    """

    axes = dict.fromkeys(("W", "W_unread"), "[d_model] d_out")

    @dataclass(frozen=True)
    class Config:
        d_model: int
        act_fn: Activation = "tanh"
        bias: bool = True
        norm: NormConfig | None = None
        mean: bool = False
        pools_last: bool = False
        unread: bool = False
        d_out: int | None = None  # of its output, if it is not d_model

        def build(self) -> "Pooler":
            return Pooler(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        d_out = cfg.d_out or cfg.d_model
        self.W = nn.Parameter(torch.empty(cfg.d_model, d_out))
        self.b = nn.Parameter(torch.zeros(d_out)) if cfg.bias else None
        if cfg.unread:
            self.W_unread, self.b_unread = (nn.Parameter(torch.empty_like(self.W)), nn.Parameter(torch.zeros(d_out)))
        self.act_fn = activation(cfg.act_fn)
        dims = ("batch", "d_model" if d_out == cfg.d_model else "d_out")
        add_norm(self, "ln", cfg.norm, dims)
        self.hook_pooler_out = HookPoint(*dims)

    def forward(self, resid: Stream, real: Real | None = None) -> Float[Tensor, "batch d_out"]:
        inputs = resid if self.cfg.pools_last else self.pooled(resid, real)
        post = self.act_fn(F.linear(inputs, self.W.T, self.b))
        return self.hook_pooler_out(norm_of(self, "ln")(self.pooled(post, real) if self.cfg.pools_last else post))

    def pooled(self, x: Stream, real: Real | None = None) -> Pooled:
        """The first real token, or with `mean` the mean of all; padding may be on either side."""
        if self.cfg.mean:
            return (
                x.mean(1) if real is None else x.masked_fill(~real[..., None], 0.0).sum(1) / real.sum(1, keepdim=True)
            )
        return x[:, 0] if real is None else x[torch.arange(len(x), device=x.device), real.long().argmax(1)]


class EndToken(nn.Module):
    """The vector at the first `end` token of a text (Radford et al. 2021, arXiv:2103.00020).

    `end` None means the first of the largest id: older configs of CLIP name a wrong end token, but its id is the largest.
    """

    @dataclass(frozen=True)
    class Config:
        d_model: int
        end: int | None

        def build(self) -> "EndToken":
            return EndToken(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.hook_pooler_out = HookPoint("batch", "d_model")

    def forward(self, resid: Stream, tokens: Int[Tensor, "batch pos"]) -> Pooled:
        return self.hook_pooler_out(self.pooled(resid, tokens))

    def pooled(self, resid: Stream, tokens: Int[Tensor, "batch pos"]) -> Pooled:
        """The same, without the hook point. Raises ValueError for a text without an end token."""
        if self.cfg.end is None:
            return resid[torch.arange(len(resid), device=resid.device), tokens.argmax(1)]
        is_end = tokens == self.cfg.end
        if is_readable(tokens) and not bool(is_end.any(1).all()):
            raise ValueError(
                f"text {int(is_end.any(1).int().argmin())} has no end token (id {self.cfg.end}), at which this model reads a text"
            )
        return resid[torch.arange(len(resid), device=resid.device), is_end.int().argmax(1)]


class LastToken(nn.Module):
    """The vector at the last position, also if that is padding: the model was trained on texts of one length."""

    @dataclass(frozen=True)
    class Config:
        d_model: int

        def build(self) -> "LastToken":
            return LastToken(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.hook_pooler_out = HookPoint("batch", "d_model")

    def forward(self, resid: Stream, tokens: Int[Tensor, "batch pos"]) -> Pooled:
        return self.hook_pooler_out(self.pooled(resid, tokens))

    def pooled(self, resid: Stream, tokens: Int[Tensor, "batch pos"]) -> Pooled:
        """The same, without the hook point."""
        return resid[:, -1]


class NSPHead(nn.Module):
    """`pooled W + b`: whether the second text follows the first (class 0) or not; `W` is [d_model, class]."""

    axes = {"W": "[d_model] class"}

    @dataclass(frozen=True)
    class Config:
        d_model: int
        n_classes: int = 2

        def build(self) -> "NSPHead":
            return NSPHead(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.W = nn.Parameter(torch.empty(cfg.d_model, cfg.n_classes))
        self.b = nn.Parameter(torch.zeros(cfg.n_classes))
        self.hook_nsp_out = HookPoint("batch", "class")

    def forward(self, resid: Pooled) -> Float[Tensor, "batch class"]:
        return self.hook_nsp_out(F.linear(resid, self.W.T, self.b))


class Classifier(nn.Module):
    """`pooled W + b`: a score for each class of texts; `W` is [d_model, class]."""

    axes = {"W": "[d_model] class"}

    @dataclass(frozen=True)
    class Config:
        d_model: int
        n_classes: int

        def build(self) -> "Classifier":
            return Classifier(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.W = nn.Parameter(torch.empty(cfg.d_model, cfg.n_classes))
        self.b = nn.Parameter(torch.zeros(cfg.n_classes))
        self.hook_out = HookPoint("batch", "class")

    def forward(self, pooled: Pooled) -> Float[Tensor, "batch class"]:
        return self.hook_out(F.linear(pooled, self.W.T, self.b))


class TokenClassifier(nn.Module):
    """`transform(x) W + b`: a score for each class of tokens; `W` is [d_model, class].

    With `single` the output is one score per token, [batch, pos].
    """

    axes = {"W": "[d_model] class"}

    @dataclass(frozen=True)
    class Config:
        d_model: int
        n_classes: int
        transform: MLMHead.Config | None = None
        single: bool = False

        def build(self) -> "TokenClassifier":
            return TokenClassifier(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        if cfg.transform is not None:
            self.transform = cfg.transform.build()
        self.W = nn.Parameter(torch.empty(cfg.d_model, cfg.n_classes))
        self.b = nn.Parameter(torch.zeros(cfg.n_classes))
        self.hook_out = HookPoint("batch", "pos", "class")

    def forward(self, x: Stream) -> Float[Tensor, "batch pos *class"]:
        transformed = x if self.cfg.transform is None else self.transform(x)
        out = self.hook_out(F.linear(transformed, self.W.T, self.b))
        return out[..., 0] if self.cfg.single else out


class SpanClassifier(TokenClassifier):
    """Scores of each token as the start (class 0) and the end (class 1) of an answer."""

    @dataclass(frozen=True)
    class Config(TokenClassifier.Config):
        def build(self) -> "SpanClassifier":
            return SpanClassifier(self)


class ContactHead(nn.Module):
    """Contacts between residues of a protein, from the patterns of all heads (Rao et al. 2021, doi:10.1101/2020.12.15.422761).

    The patterns are made symmetric, with the average product correction (the products of row and column means are
    subtracted); then `sigmoid(patterns W + b)` with `W` [map, 1], where a map is the pattern of one head. The first and last
    positions, which are special tokens, are cut off, and end tokens are masked.
    """

    axes = {"W": "[map] 1"}

    @dataclass(frozen=True)
    class Config:
        n_maps: int
        end_token: int

        def build(self) -> "ContactHead":
            return ContactHead(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.W = nn.Parameter(torch.empty(cfg.n_maps, 1))
        self.b = nn.Parameter(torch.zeros(1))

    def forward(
        self, patterns: Float[Tensor, "batch map pos pos"], tokens: Int[Tensor, "batch pos"], real: Real | None = None
    ) -> Float[Tensor, "batch residue residue"]:
        """The probability of contact of each pair of residues; there are two more positions than residues."""
        is_residue = tokens != self.cfg.end_token
        is_residue = is_residue if real is None else is_residue & real
        both = is_residue[:, None, :, None] & is_residue[:, None, None, :]
        patterns = patterns.masked_fill(~both, 0.0)[..., 1:-1, 1:-1]
        symmetric = patterns + patterns.mT
        expected = (
            symmetric.sum(-1, keepdim=True) * symmetric.sum(-2, keepdim=True) / symmetric.sum((-2, -1), keepdim=True)
        )
        return (torch.einsum("bmij,m->bij", symmetric - expected, self.W[:, 0]) + self.b).sigmoid()
