"""Text methods shared by all model classes, and those of decoders."""

from collections.abc import Sequence, Sized
from typing import Any, ClassVar, SupportsIndex

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.components.embeddings.transformed_unembed import check_linear
from hooked_lm.components.kv_cache import KeyValueCache
from hooked_lm.models.checks import is_ids
from hooked_lm.models.config import defaults
from hooked_lm.models.config.flat import HookedTransformerConfig
from hooked_lm.models.text.bos import prepends_bos
from hooked_lm.models.text.chat import Chat
from hooked_lm.models.text.chat_of_messages import make_chat
from hooked_lm.models.text.tokenizer import TokenIds, Tokenizer
from hooked_lm.models.text.tokens import Tokens


class TextMethods:
    """Text methods of every model class; each delegates to `Tokens` with the model's defaults."""

    cfg: Any
    tokenizer: Any = None
    device: torch.device
    _tokens: tuple[tuple[Any, ...], Tokens] | None = None  # the arguments of the last `Tokens`, and it
    _side_at_first: tuple[Any, str | None] = (None, None)  # the tokenizer, and its `padding_side` when it was set
    pads_on: ClassVar[str | None] = None  # the side of padding, if it is always the same
    _copied: tuple[Any, Any] = (None, None)  # the tokenizer, and the one that was set, of which it may be a copy

    def _prepends_bos(self) -> bool:
        """The default of `prepend_bos`."""
        return False

    @property
    def padding_side(self) -> str:
        """Where shorter texts are padded: on the side of the config, unless `tokenizer.padding_side` was set since.

        A config that says None leaves it to the tokenizer.
        """
        side: str | None = getattr(self.tokenizer, "padding_side", None)
        was = self._side_at_first[1] if self._side_at_first[0] is self.tokenizer else side
        default: str | None = self.cfg.default_padding_side
        return default or side or "right" if side is None or side == was else side

    @property
    def tokens(self) -> Tokens:
        """The tokenizer with the current defaults of the config."""
        made_from = (
            self.tokenizer,
            self._prepends_bos(),
            self.pads_on or self.padding_side,
            self.cfg.n_ctx,
            self.cfg.d_vocab,
        )
        if self._tokens is None or self._tokens[0] != made_from:
            *defaults, n_ctx, d_vocab = made_from
            self._tokens = made_from, Tokens(*defaults, n_ctx=n_ctx, d_vocab=d_vocab)
        return self._tokens[1]

    def set_tokenizer(self, tokenizer: Tokenizer | None, default_padding_side: str | None = None) -> None:
        """Sets the model's tokenizer, which is never modified; of a decoder under the name `transformer_lens`, a copy of it."""
        if default_padding_side is not None:
            self.cfg.default_padding_side = default_padding_side
        self.tokenizer = self._for_texts(tokenizer)
        self._copied = self.tokenizer, tokenizer
        self._side_at_first = self.tokenizer, getattr(self.tokenizer, "padding_side", None)
        if tokenizer is None:
            return
        self.cfg.tokenizer_name = self.cfg.tokenizer_name or getattr(tokenizer, "name_or_path", None)
        if self.cfg.d_vocab == -1 and isinstance(tokenizer, Sized):
            self.cfg.d_vocab = len(tokenizer)
        self._note_tokenizer()

    def _note_tokenizer(self) -> None:
        """Called with a new tokenizer: what the config says about it follows."""

    def _for_texts(self, tokenizer: object) -> Any:
        """The tokenizer that the model has once this one is set."""
        return tokenizer

    @property
    def saved_tokenizer(self) -> Any:
        """The tokenizer that is written beside the weights: the one that was set, unless the model's has changed since."""
        copy, original = self._copied
        is_same = copy is self.tokenizer and (copy is None or len(copy) == len(original))
        return original if is_same else self.tokenizer

    def to_string(self, tokens: TokenIds) -> str | list[str]:
        """Decodes token ids: a string for one sequence, a list of strings for a batch."""
        return self.tokens.to_string(tokens)

    def to_single_token(self, string: str) -> int:
        """Returns the id of a string that is one token; ValueError with its tokens if it is several."""
        return self.tokens.to_single_token(string)

    def to_single_str_token(self, int_token: int) -> str:
        """Returns the string of one token id."""
        return self.tokens.to_single_str_token(int_token)

    def _ids(self, tokens: Tensor) -> Int[Tensor, "batch pos"]:
        """Token ids [batch, pos] or [pos] as [batch, pos], on their device. ValueError for other tensors."""
        if not is_ids(tokens):
            raise ValueError(
                f"token ids must be integers [batch, pos] or [pos], got {tokens.dtype} of shape {tuple(tokens.shape)}"
            )
        return (tokens if tokens.ndim == 2 else tokens[None]).to(torch.long)


class DecoderText(TextMethods):
    """Text methods of a model that continues text: BOS before a text, if the config asks for it, and nothing after."""

    cfg: HookedTransformerConfig

    def _prepends_bos(self) -> bool:
        return self.cfg.default_prepend_bos

    def _note_tokenizer(self) -> None:
        self.cfg.tokenizer_prepends_bos = prepends_bos(self.tokenizer)

    def _for_texts(self, tokenizer: object) -> Any:
        return tokenizer if tokenizer is None else defaults.tokenizer_for(tokenizer, self.cfg)

    def to_tokens(
        self,
        input: str | Sequence[str],
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        move_to_device: bool = True,
        truncate: bool = True,
    ) -> Int[Tensor, "batch pos"]:
        """Returns the token ids of text, [batch, pos], padded to the longest; `prepend_bos` defaults to the config's.

        >>> from hooked_lm import HookedTransformer
        >>> model = HookedTransformer.from_pretrained("demo")
        >>> model.to_tokens("Mary went home").shape[0]
        1
        """
        device = self.device if move_to_device else None
        return self.tokens.to_tokens(input, prepend_bos, padding_side, truncate, device)

    def to_str_tokens(
        self, input: str | TokenIds, prepend_bos: bool | None = None, padding_side: str | None = None
    ) -> list[str] | list[list[str]]:
        """Returns the tokens of text or ids, each as a string; for a list of texts, one list per text."""
        return self.tokens.to_str_tokens(input, prepend_bos, padding_side)

    def get_token_position(
        self,
        single_token: str | SupportsIndex,
        input: str | TokenIds,
        mode: str = "first",
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
    ) -> int:
        """Returns the "first" or "last" position of a token in text or ids; ValueError if it does not occur."""
        return self.tokens.get_token_position(single_token, input, mode, prepend_bos, padding_side)

    def chat(self, messages: Sequence[Any], add_generation_prompt: bool = False, **template_options: object) -> Chat:
        """Returns a conversation as token ids, with the turn, the role and the part of a message of each token.

        `messages` are dicts with "role" and "content", as chat templates read them, also with "reasoning_content" and
        "tool_calls"; several such lists are a batch, padded on the left. The checkpoint's own template writes the text, with
        `template_options` such as `tools` or `enable_thinking`, or `chat_template` to give another one. What it adds has
        the role "template". A `Chat` is a prompt: `model(chat)`, `run_with_cache(chat)`, `generate(chat)`.

        Raises ValueError without a template, for what the template refuses, an empty message, an image, and where it cannot be
        told for certain which text is whose; TypeError for what is no message.

        >>> from hooked_lm import HookedTransformer
        >>> model = HookedTransformer.from_pretrained("demo")
        >>> turns = "{% for m in messages %}{{ m.role }}: {{ m.content }}\\n{% endfor %}"
        >>> chat = model.chat(
        ...     [{"role": "user", "content": "Mary went home"}], chat_template=turns
        ... )
        >>> chat.of("user"), chat.tokens.shape == (1, len(chat.labels[0]))
        (' Mary went home', True)
        """
        options = {"add_generation_prompt": add_generation_prompt, **template_options}
        return make_chat(self.tokens, messages, options).to(self.device)

    def tokens_to_residual_directions(self, tokens: object) -> Float[Tensor, "*tokens d_model"]:
        """Returns the residual stream direction of a token's logit: its column of `W_U`.

        `tokens` is a single-token string or an id, a list of such strings, or ids of any shape; of one token, in any shape, it
        returns [d_model]. Raises ValueError for a model with a transform between the stream and `W_U`.
        """
        check_linear(self.unembed)  # type: ignore[attr-defined]
        ids = self.tokens.single_token_ids(tokens, self.device)
        directions = self.W_U.T[ids]  # type: ignore[attr-defined]
        return directions.flatten() if ids.numel() == 1 else directions

    def _tokens_and_mask(
        self,
        input: str | Sequence[str] | Tensor | Chat,
        prepend_bos: bool | None,
        padding_side: str | None,
        attention_mask: Tensor | None,
        cache: KeyValueCache | None = None,
    ) -> tuple[Int[Tensor, "batch pos"], Tensor | None]:
        """Ids and attention mask of any input; a mask given by the caller takes precedence.

        The mask of ids is inferred only where it affects real tokens: with left padding, or with a cache, as later
        tokens follow the padding. A continuation of cached tokens is not expected to begin with BOS.
        """
        if isinstance(input, Chat):
            mask = input.attention_mask if attention_mask is None else attention_mask
            input, attention_mask = input.tokens, mask
        if isinstance(input, Tensor):
            if input.ndim == 3:
                raise ValueError(
                    f"token ids must be integers [batch, pos], got shape {tuple(input.shape)}; to pass a residual "
                    "stream, give start_at_layer"
                )
            tokens = self._ids(input)
            side = padding_side or self.padding_side
            matters = side == "left" or cache is not None
            if attention_mask is None and self.tokenizer is not None and matters:
                is_continuation = cache is not None and cache.length > 0
                with_bos = False if is_continuation and prepend_bos is None else prepend_bos
                attention_mask = self.tokens.attention_mask(tokens, with_bos, side)
        else:
            tokens, mask = self.tokens.encode(input, prepend_bos, padding_side, truncate=False)
            attention_mask = mask if attention_mask is None else attention_mask
        if tokens.device != self.device:
            self.checked_tokens(tokens)  # type: ignore[attr-defined]  # where their values can be read
        return tokens.to(self.device), attention_mask
