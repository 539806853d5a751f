"""A vision-language model: text and images in, logits out."""

import re
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from hooked_lm.components.blocks.wiring import scales_outputs
from hooked_lm.components.context import Context
from hooked_lm.components.kv_cache import KeyValueCache
from hooked_lm.components.readable import is_readable
from hooked_lm.components.vision.image_context import ImageContext, ImageFeatures
from hooked_lm.hooks import HookPoint
from hooked_lm.hooks.indices import Indices, indices_in, plain_indices
from hooked_lm.hooks.select import UnknownSite
from hooked_lm.models.caches.activation_cache import ActivationCache
from hooked_lm.models.checks import one_input
from hooked_lm.models.config.flat_vision import HookedVisionLanguageConfig
from hooked_lm.models.config.tree import VisionLanguageConfig
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.loss import from_the_end
from hooked_lm.models.names import SYNONYMS, site_name
from hooked_lm.models.prefix import Prefix, PrefixedPrompt, Prompt
from hooked_lm.models.stack import Stream, checked_ids
from hooked_lm.models.text.chat import Chat
from hooked_lm.models.verification.identities import vision_language_identities
from hooked_lm.models.verification.verify import Verification, verify
from hooked_lm.models.vision import bridge_names, chats_with_images, prompts_with_images
from hooked_lm.models.vision.image_positions import ImagePositions, located
from hooked_lm.models.vision.inputs import Given, GivenImages, ImageTensors, TowerInputs, VisionInputs
from hooked_lm.models.vision.tower import VisionTower

OF_IMAGES = ("vision.", "projector.", "hook_image_features")  # the sites that a run without images does not reach
PACKED = re.compile(r"\w+\.[a-z_]+\d+\w*")  # a short name with its layer, as "vision.z5"
TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids", "labels")  # of processors: which are of images, and labels


class ImageCache(ActivationCache):
    """The cache of a model that reads images, which has no sites of images after a run without them."""

    def _condition(self, name: str) -> str:
        if not name.startswith(OF_IMAGES) or any(site.startswith(OF_IMAGES) for site in self.cache_dict):
            return ""
        return ", if the prompt has images: this cache has no site of any"


class VisionLanguage(Decoder):
    """A decoder that reads images among its tokens; every intermediate value of both sides has a name.

    The decoder's sites have their usual names, also with "language." in front; those of the tower begin with "vision.".
    `projector.hook_out` [image, token, d_model] are the vectors of image tokens as the projector makes them,
    `hook_image_features` as they enter the text, and `hook_embed_merged` is the stream with both.
    """

    config_class = HookedVisionLanguageConfig  # type: ignore[assignment]
    context_class = ImageContext
    sites_of_images = OF_IMAGES
    cache_class = ImageCache
    prepare = prompts_with_images.prepare
    chat = chats_with_images.chat
    processor: Any = None  # of the checkpoint, as transformers has it
    why_no_processor: str | None = None

    @property
    def tree(self) -> VisionLanguageConfig:
        """The component configs of the model."""
        assert isinstance(self.cfg.tree, VisionLanguageConfig)  # checked when it was built
        return self.cfg.tree

    def make_embedding(self, tree: VisionLanguageConfig) -> None:  # type: ignore[override]
        self.vision = VisionTower(tree.vision)
        self.projector = tree.projector.build()
        self.hook_image_features = HookPoint("batch", "pos", "d_model")
        for module in (self.vision, self.projector, self.hook_image_features):
            for point in (point for point in module.modules() if isinstance(point, HookPoint)):
                point.grows = False
        super().make_embedding(tree)
        self.hook_embed_merged = HookPoint("batch", "pos", "d_model")

    def find_aliases(self, names: Collection[str]) -> dict[str, str]:
        """Alias -> site: names of other libraries, the decoder's with "language." or "lm." in front, those of both other parts
        as TransformerBridge calls them."""
        found = dict(super().find_aliases(names))
        for name in names:
            part = name.partition(".")[0]
            if part not in ("projector", "vision", "hook_image_features"):
                found |= {f"language.{name}": name, f"lm.{name}": name}
        tower = self.tree.vision
        read = self.tree.feature_layers is None and not tower.embed.n_before  # the projector reads the tower's output
        scaled = [i for i, block in enumerate(self.vision.blocks) if scales_outputs(block)]
        return found | bridge_names.aliases(names, len(tower.blocks), scaled, reads_output=read)

    def site_name(self, site: object) -> str:
        """The full name of a site; a short name with "vision." in front, as ("vision.z", 5), is one of the tower, with
        "language." or "lm." one of the decoder."""
        name, *rest = site if isinstance(site, tuple) else (site,)
        if isinstance(name, str) and name not in self.aliases and (why := bridge_names.refusal(name)):
            raise UnknownSite(why)
        is_short = isinstance(name, str) and name not in SYNONYMS and (rest or PACKED.fullmatch(name))
        side, _, short = name.partition(".") if is_short else ("", "", "")
        if side == "vision":
            return "vision." + site_name((short, *rest), len(self.vision.blocks))
        return super().site_name((short, *rest) if side in ("lm", "language") else site)

    def stack_of(self, name: str) -> tuple[str, int]:
        """The stack of a site with this short name; see `BaseModel.stack_of`."""
        stack, n_layers = super().stack_of(name)
        return ("vision", len(self.vision.blocks)) if n_layers and name.startswith("vision.") else (stack, n_layers)

    def forward(  # type: ignore[override]
        self,
        input: Given = None,
        return_type: str | None = "logits",
        *,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Runs the model on text and images.

        Args:
            input, input_ids: text, token ids, or `VisionInputs`.
            options: the images, under the names that the processor gives them, such as `pixel_values`; all other arguments
                are those of `Decoder.forward`. For a model that reads prompts in both directions `token_type_ids` are 1 at the
                tokens after a prompt; other models accept them and do not need them, nor `mm_token_type_ids`.
                `labels` are not read: the loss counts image tokens too, unless `loss_per_token=True` and the caller leaves
                them out. With `start_at_layer`, `tokens` and the images say where images are in the stream.

        Raises ValueError as `Decoder.forward` does, and if the number of image tokens is not that of the images.
        """
        images = self._images_in(options)
        if options.get("start_at_layer") is not None:
            options["tokens"] = self._prompt_of_stream(options.get("tokens"), images)
        elif (input is None) != (input_ids is None):
            prompt = self._collected(input if input_ids is None else input_ids, images, attention_mask)
            input, input_ids, attention_mask = prompt, None, prompt.attention_mask
        read: Any = input  # a mapping is a prompt now
        return super().forward(read, return_type, input_ids=input_ids, attention_mask=attention_mask, **options)

    def generate(
        self,
        input: Given | Prompt = None,
        *args: Any,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Continues a prompt with images; arguments as for `forward`, and otherwise those of `generation.generate`.

        Images are read in the pass over the prompt. A token of images that the model generates is a word like others.
        """
        return super().generate(self._prompt(input, input_ids, attention_mask, options), *args, **options)

    def generate_stream(
        self,
        input: Given | Prompt = None,
        *args: Any,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> Iterator[Any]:
        """Yields the result of `generate` in pieces; see `generation.generate_stream`."""
        return super().generate_stream(self._prompt(input, input_ids, attention_mask, options), *args, **options)

    def _prompt(
        self, input: Given | Prompt, input_ids: Tensor | None, mask: Tensor | None, options: dict[str, Any]
    ) -> Any:
        """The prompt of a generation, its images cut into patches for all passes; takes the images out of `options`."""
        if isinstance(input, Prefix | PrefixedPrompt | Chat):
            return input
        images = self._images_in(options)
        given = "" if input is None and input_ids is None else one_input(input, input_ids)
        return self._in_tower(self._collected(given, images, mask))

    def _in_tower(self, prompt: VisionInputs) -> VisionInputs:
        """The prompt with its images cut into patches."""
        return replace(prompt, images=self.vision.resolved(prompt.images)) if prompt.images else prompt

    def _images_in(self, options: dict[str, Any]) -> dict[str, Any]:
        """Takes the tensors that describe images, and types of tokens, out of `options`."""
        return {name: options.pop(name) for name in (*self.image_arguments, *TOKEN_TYPES) if name in options}

    def _suffix(self, images: ImageTensors) -> Bool[Tensor, "batch pos"] | None:
        """Which tokens come after a prompt that is read in both directions; None if nothing says so."""
        types = images.get("token_type_ids")
        return types == 1 if types is not None and self.reads_both_ways else None

    @property
    def reads_both_ways(self) -> bool:  # type: ignore[override]
        return any(rule.reads_suffix for rule in self.tree.rules)

    @property
    def image_arguments(self) -> tuple[str, ...]:
        """The names of the tensors that describe images."""
        return self.vision.tree.pixels.arguments

    def inputs(
        self, given: Given, images: GivenImages | None = None, attention_mask: Tensor | None = None
    ) -> VisionInputs:
        """Any input as `VisionInputs`: text, ids, the output of a processor; images as tensors that are ready."""
        found, vision = self._collected(given, images, attention_mask), self.tree.vision
        if isinstance(found.images, TowerInputs):
            return found
        return replace(found, images=vision.pixels.ready(vision.embed, found.images))

    def _collected(
        self, given: Given, images: GivenImages | None = None, attention_mask: Tensor | None = None
    ) -> VisionInputs:
        """Any input as `VisionInputs`, its images as they were given."""
        found = {name: value for name, value in (images or {}).items() if value is not None}
        if isinstance(given, Mapping):
            names = (*self.image_arguments, *TOKEN_TYPES)
            found |= {name: given[name] for name in names if given.get(name) is not None}
            attention_mask = given.get("attention_mask") if attention_mask is None else attention_mask
            given = given["input_ids"]
        is_suffix = self._suffix(found)
        found = {name: value for name, value in found.items() if name not in TOKEN_TYPES}
        if not isinstance(given, VisionInputs):
            return VisionInputs(given, found, attention_mask, is_suffix=is_suffix)
        attention_mask = given.attention_mask if attention_mask is None else attention_mask
        is_suffix = given.is_suffix if is_suffix is None else is_suffix
        given = replace(given, attention_mask=attention_mask, is_suffix=is_suffix)
        if found and isinstance(given.images, TowerInputs):
            raise ValueError(f"the images of these inputs are in the tower already: leave out {', '.join(found)}")
        return replace(given, images={**given.images, **found}) if found else given

    def embedded(
        self,
        input: Given,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        attention_mask: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> tuple[Stream, Int[Tensor, "batch pos"], Context]:
        """The stream before the first block, the token ids, and the context of the run."""
        inputs = self._collected(input, None, attention_mask)
        tokens, mask = self._tokens_and_mask(inputs.tokens, prepend_bos, padding_side, inputs.attention_mask, cache)
        context = self._context(tokens, mask, cache)
        tokens = self.hook_tokens(tokens)
        known = self.checked_tokens(tokens)
        is_image = self.images_among(known) if inputs.is_image is None else inputs.is_image.to(tokens.device)
        in_vocabulary = self.tree.image_token < self.cfg.d_vocab
        embed = self.hook_embed(self.embed(known if in_vocabulary else known.masked_fill(is_image, 0)))
        features = self._read_images(context, tokens, is_image, inputs)
        if features is not None:
            vectors = features.in_order(features.vectors).to(embed.dtype)
            embed = embed.masked_scatter(is_image[..., None], vectors)
        return self._with_positions(self.hook_embed_merged(embed), tokens, context), tokens, context

    def _read_images(
        self, context: Context, tokens: Tensor, is_image: Bool[Tensor, "batch pos"], inputs: VisionInputs
    ) -> ImageFeatures | None:
        """The vectors of the image tokens; the rules of the model are applied to the context."""
        features = self.image_features(inputs.images) if inputs.images else None
        self._check_images(is_image, features)
        assert isinstance(context, ImageContext), "the context of this class"
        context.suffix = _of_new(inputs.is_suffix, tokens, context.n_key)
        for rule in self.tree.rules:
            rule.apply(context, is_image, features)
        return features

    def _prompt_of_stream(self, tokens: Given, images: GivenImages) -> VisionInputs:
        """The prompt that a stream is of; ValueError if it is not known and images change more than the stream."""
        if tokens is None and (images or self.tree.rules):
            raise ValueError(
                "a run of this model that starts at a layer needs tokens=..., and the images among them: they say where the "
                "stream has images, on which positions and masks depend"
            )
        return self._collected(tokens, images)

    def _resumed(
        self,
        input: Any,
        tokens: Int[Tensor, "batch pos"] | VisionInputs | None,
        pos_embed: Tensor | None,
        mask: Tensor | None,
        cache: KeyValueCache | None,
    ) -> tuple[Stream, Int[Tensor, "batch pos"] | None, Context]:
        prompt = self._in_tower(self._collected(tokens))
        resid, ids, context = super()._resumed(input, prompt.tokens, pos_embed, mask, cache)
        if ids is not None and self.tree.rules:
            known = self.checked_tokens(ids.to(resid.device))
            is_image = self.images_among(known) if prompt.is_image is None else prompt.is_image.to(resid.device)
            self._read_images(context, known, is_image, prompt)
        return resid, ids, context

    def images_among(self, tokens: Int[Tensor, "batch pos"]) -> Bool[Tensor, "batch pos"]:
        """Which tokens have the id of image tokens."""
        return tokens == self.tree.image_token

    def checked_tokens(self, tokens: Int[Tensor, "batch pos"]) -> Int[Tensor, "batch pos"]:
        """Token ids with negative ones counted from the end; ValueError for an id that the model does not read."""
        if not is_readable(tokens):
            return from_the_end(tokens, self.cfg.d_vocab)
        if self.tree.image_token < self.cfg.d_vocab:
            return super().checked_tokens(tokens)
        is_image = self.images_among(tokens)
        return torch.where(is_image, tokens, checked_ids(tokens.masked_fill(is_image, 0), self.cfg.d_vocab))

    def image_features(self, images: ImageTensors | TowerInputs) -> ImageFeatures:
        """The vectors of the image tokens, at their sites."""
        tower, known = self.vision, self.vision.resolved(images)
        start = known.streams or None
        x, _ = tower.read(known.patches, self.tree.feature_layers, pooler=tower.pooler, start=start)
        features: ImageFeatures = self.projector(x, known.patches, tower.embed.cfg.n_class_tokens)
        return replace(features, vectors=self.hook_image_features(features.vectors))

    def _check_images(self, is_image: Bool[Tensor, "batch pos"], features: ImageFeatures | None) -> None:
        """Raises ValueError if the number of image tokens is not that of the images, where it can be read."""
        if not is_readable(is_image):
            return
        n_tokens, n_features = int(is_image.sum()), 0 if features is None else sum(features.n_tokens)
        if n_tokens != n_features:
            images = (
                "there are no images" if features is None else f"the {len(features.n_tokens)} images have {n_features}"
            )
            raise ValueError(
                f"the prompts have {n_tokens} image tokens (id {self.tree.image_token}), but {images}: every image needs as many "
                "as it has vectors, which model.prepare writes"
            )

    def rows(self, inputs: VisionInputs, which: Indices) -> VisionInputs:
        """Some of the prompts, with the images whose tokens they have; `which` are indices, or a slice.

        Raises ValueError if an image has tokens in two prompts, TypeError for a mask.

        >>> import torch
        >>> from hooked_lm import HookedVisionLanguage, VisionInputs
        >>> sizes = dict(n_layers=1, d_model=16, n_heads=2, act_fn="gelu")
        >>> tower = dict(sizes, image_size=8, patch_size=4)
        >>> cfg = dict(sizes, n_ctx=16, d_vocab=10, vision=tower, image_token=9)
        >>> model = HookedVisionLanguage(cfg)
        >>> tokens = torch.tensor([[1, 2, 3, 4], [9, 9, 9, 9]])
        >>> both = VisionInputs(tokens, {"pixel_values": torch.zeros(1, 3, 8, 8)})
        >>> twice = model.rows(both, [1, 1])
        >>> model.rows(both, [0]).images, list(twice.images["pixel_values"].shape)
        ({}, [2, 3, 8, 8])
        """
        if not isinstance(inputs.tokens, Tensor):
            raise TypeError("rows are of token ids, which model.prepare makes of text")
        if isinstance(inputs.images, TowerInputs):
            raise TypeError("the images of these rows are in the tower already: choose among rows before a run")
        numbers = indices_in("rows", plain_indices("rows", which), len(inputs))
        marks = {
            name: x[torch.tensor(numbers, dtype=torch.long, device=x.device)] for name, x in inputs.of_rows().items()
        }
        own = self._images_of_rows(inputs) if inputs.images else []
        chosen = [own[row] for row in numbers if own and own[row]]
        images = self.tree.vision.pixels.select(chosen, **inputs.images) if chosen else {}
        return replace(inputs, images=images, **marks)

    def _images_of_rows(self, inputs: VisionInputs) -> list[list[int]]:
        """The numbers of the images of each prompt."""
        is_image = self.images_among(inputs.tokens) if inputs.is_image is None else inputs.is_image
        self._check_images(is_image, layout := self.image_layout(inputs.images))
        ends = torch.tensor([0, *layout.n_tokens]).cumsum(0).tolist()
        borders = torch.tensor([0, *is_image.sum(1).tolist()]).cumsum(0).tolist()
        for row, border in enumerate(borders):
            if border not in ends:
                image = bisect_left(ends, border) - 1
                raise ValueError(f"image {image} has tokens in two prompts, {row - 1} and {row}")
        steps = pairwise(borders)
        return [[image for image, end in enumerate(ends[1:]) if start < end <= stop] for start, stop in steps]

    # ---- places of images --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def image_layout(self, images: ImageTensors | TowerInputs) -> ImageFeatures:
        """The places of the image tokens of some images, without a run of the tower; the vectors have no values."""
        embed, width = self.vision.embed, self.vision.embed.cfg.d_model * len(self.tree.feature_layers or (0,))
        patches = self.vision.resolved(images).patches
        self.tree.vision.check_sizes(patches)
        with torch.device("meta"):  # a projector without hooks
            projector = self.tree.projector.build()
        n_class, (n_images, n_patches) = embed.cfg.n_class_tokens, patches.vectors.shape[:2]
        features: ImageFeatures = projector(
            torch.empty(n_images, n_class + n_patches, width, device="meta"), patches, n_class
        )
        return features

    def image_positions(self, inputs: Given, **images: Tensor | None) -> ImagePositions:
        """The image, row and column of each token of these inputs; inputs as for `forward`.

        >>> import torch
        >>> from hooked_lm import HookedVisionLanguage
        >>> model = HookedVisionLanguage.from_pretrained("demo-shapes")
        >>> inputs = model.prepare("<image> which shape is red ?", torch.zeros(3, 36, 36))
        >>> places = model.image_positions(inputs)
        >>> places.cell(6), places.position(image=0, row=1, column=0)
        ((0, 1, 0), (0, 6))
        """
        given = self._collected(inputs, images, images.pop("attention_mask", None))
        tokens, _ = self._tokens_and_mask(given.tokens, None, None, given.attention_mask)
        is_image = self.images_among(tokens) if given.is_image is None else given.is_image
        layout = self.image_layout(given.images) if given.images else None
        self._check_images(is_image, layout)
        if layout is None:
            return located(is_image, [], torch.empty(0, 2, dtype=torch.long))
        return located(is_image, layout.n_tokens, layout.in_order(layout.cells))

    def patch_grid(self, inputs: Given, **images: Tensor | None) -> list[Int[Tensor, "row column"]]:
        """The position in its prompt of each place of each image; inputs as for `forward`.

        >>> import torch
        >>> from hooked_lm import HookedVisionLanguage
        >>> model = HookedVisionLanguage.from_pretrained("demo-shapes")
        >>> inputs = model.prepare("<image> which shape is red ?", torch.zeros(3, 36, 36))
        >>> model.patch_grid(inputs)[0][1].tolist()
        [6, 7, 8, 9, 10, 11]
        """
        places = self.image_positions(inputs, **images)
        return [places.grid(image) for image in range(places.n_images)]

    # ---- checks ------------------------------------------------------------------------------------------------------

    def verify(self, tokens: Given = None) -> Verification:
        """Checks the identities between this model's sites, on random text around two images by default."""
        inputs = self.inputs(self.drawn_inputs() if tokens is None else tokens)
        ids = inputs.tokens.to(self.device)
        return verify(
            self, (ids,), lambda at, logits: vision_language_identities(self, at, logits, ids), **inputs.images
        )

    def drawn_inputs(self, seed: int = 0) -> VisionInputs:
        """Two rows of random text, each around a random image; the same on every call."""
        generator = torch.Generator().manual_seed(seed)
        tower = self.tree.vision
        images = tower.pixels.drawn(tower.embed, tower.grid, 2, generator)
        rows = []
        for n in self.image_layout(images).n_tokens:
            text = torch.randint(1, min(self.tree.image_token, self.cfg.d_vocab), (6,), generator=generator)
            rows.append(torch.cat([text[:2], text.new_full((n,), self.tree.image_token), text[2:]]))
        return VisionInputs(torch.stack(rows), images)


def _of_new(
    marks: Bool[Tensor, "batch all_pos"] | None, tokens: Int[Tensor, "batch pos"], n_key: int
) -> Bool[Tensor, "batch pos"] | None:
    """The marks of the new tokens, given for them or for the cached ones too. Raises ValueError for another shape."""
    if marks is None:
        return None
    if len(marks) != len(tokens) or marks.shape[1] not in (tokens.shape[1], n_key):
        raise ValueError(f"token_type_ids has shape {tuple(marks.shape)}, but the tokens {tuple(tokens.shape)}")
    return marks[:, -tokens.shape[1] :].to(tokens.device)
