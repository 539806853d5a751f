"""The user-facing model classes: the models of `hooked_lm.models`, with loading and saving of checkpoints.

`from_pretrained` loads any checkpoint and chooses the class. Analysis code does not import this module: it takes a
`Decoder`, `Encoder` or `EncoderDecoder`, independent of the source of the weights.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from typing_extensions import TypeVar

from hooked_lm import hub
from hooked_lm.callers import warn_caller
from hooked_lm.hub import datasets, native
from hooked_lm.hub.device_map import Device, placement
from hooked_lm.hub.export import folder_of
from hooked_lm.hub.lora import LoRA
from hooked_lm.hub.options import Options, one_device
from hooked_lm.keywords import answer_keywords
from hooked_lm.models.base import BaseModel
from hooked_lm.models.config.read import Tree
from hooked_lm.models.config.tree import (
    DecoderConfig,
    DualEncoderConfig,
    EncoderConfig,
    EncoderDecoderConfig,
    VisionConfig,
    VisionLanguageConfig,
)
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.encoder import Encoder
from hooked_lm.models.encoder_decoder import EncoderDecoder
from hooked_lm.models.text.tokenizer import Tokenizer
from hooked_lm.models.vision.dual_encoder import DualEncoder
from hooked_lm.models.vision.encoder import VisionEncoder
from hooked_lm.models.vision.vision_language import VisionLanguage
from hooked_lm.models.weights.fold import process_weights
from hooked_lm.models.weights.weight_scope import WeightScope

__all__ = [
    "HookedDualEncoder",
    "HookedEncoder",
    "HookedEncoderDecoder",
    "HookedTransformer",
    "HookedVLM",
    "HookedVisionEncoder",
    "HookedVisionLanguage",
    "from_pretrained",
    "from_pretrained_no_processing",
]

Own = TypeVar("Own", bound="PretrainedModel", default="PretrainedModel")


class PretrainedModel(BaseModel):
    """A mixin for loading and saving checkpoints; it precedes the model class in the list of bases."""

    @classmethod
    def from_pretrained(
        cls: type[Own], model_name: str | os.PathLike[str] | None = None, *args: Any, **kwargs: Any
    ) -> Own:
        """A model of this class from a hub id, a local directory, a short name or "demo"; see `pretrained.from_pretrained`."""
        return from_pretrained(model_name, *args, cls=cls, **kwargs)

    @classmethod
    def from_pretrained_no_processing(
        cls: type[Own], model_name: str | os.PathLike[str] | None = None, *args: Any, **kwargs: Any
    ) -> Own:
        """Like `from_pretrained`, with the checkpoint's weights unchanged."""
        return from_pretrained_no_processing(model_name, *args, cls=cls, **kwargs)

    def with_adapter(self, adapter: LoRA | str | os.PathLike[str]) -> WeightScope:
        """A scope in which a LoRA adapter is on: for runs in the `with` block, in the thread or task that opened it.

        The weights do not change. What reads them inside of the block, such as a run, `generate`, or `model.W_Q`, gets
        W + scale B A, also with gradients; `named_parameters`, `state_dict` and `save` have W. Changes of nested blocks add up.
        Folding, quantising and loading weights are refused inside. What else edits such a weight in place there is lost after it.

        Args:
            adapter: a folder that peft wrote (`adapter_config.json` and weights), a repository of the hub, or a `hub.LoRA`.

        Raises ValueError for folded weights (see `from_pretrained_no_processing`), for an adapter of another model, for a tied
        embedding, and, by name, for what is not supported, such as DoRA; `from_pretrained(folder)` loads those merged.

        >>> from hooked_lm import HookedTransformer
        >>> from hooked_lm.demo.verbalizer import PATH
        >>> model = HookedTransformer.from_pretrained_no_processing("demo")
        >>> before = model("The capital of France is")
        >>> with model.with_adapter(PATH):
        ...     changed = model("The capital of France is")
        >>> torch.equal(model("The capital of France is"), before), torch.equal(changed, before)
        (True, False)
        """
        return hub.adapter_scope(self, adapter)

    def to_hf(self) -> Any:
        """Returns a transformers model with the same weights, bit for bit; see `hooked_lm.hub.to_hf`."""
        return hub.to_hf(self)  # type: ignore[arg-type]

    def save_pretrained(self, path: str | os.PathLike[str]) -> None:
        """Writes this model to a directory in HF format; see `hooked_lm.hub.save_pretrained`."""
        hub.save_pretrained(self, path)  # type: ignore[arg-type]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes this model to a folder, in the format of this library; `load` makes the same model of it, bit for bit.

        For any model: built from a config, trained, folded, of any dtype; with its tokenizer, without its hooks.
        `save_pretrained` writes the format of transformers. See `hooked_lm.hub.native` for the files and the errors raised.

        >>> import tempfile, torch
        >>> from hooked_lm import HookedTransformer
        >>> model = HookedTransformer(
        ...     dict(n_layers=1, d_model=16, n_heads=2, n_ctx=8, d_vocab=10, act_fn="gelu")
        ... )
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save(f"{folder}/toy")
        ...     again = HookedTransformer.load(f"{folder}/toy")
        ...     torch.equal(again(torch.tensor([[5, 3]])), model(torch.tensor([[5, 3]])))
        True
        """
        hub.save(self, path)  # type: ignore[arg-type]

    @classmethod
    def load(
        cls: type[Own],
        path: str | os.PathLike[str],
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | str = "auto",
        mmap: bool = False,
    ) -> Own:
        """The model that `save` wrote to a folder, with unchanged weights, in evaluation mode.

        By default it is in the dtype that it was saved in, on the first GPU or else the CPU, and independent of the file; with
        `mmap` weights on the CPU are views of the file. `from_pretrained` takes such a folder, too, and folds weights by default.

        Raises ValueError if there is no such folder, if `save` did not write it, and for a model of another class.
        """
        folder = folder_of(path)
        if not (folder / native.CONFIG).is_file():
            wrong = (
                f"{native.CONFIG} is not in it: load it with from_pretrained" if folder.is_dir() else "no such folder"
            )
            raise ValueError(f"{str(path)!r} is no model that model.save wrote: {wrong}")
        options = Options(device=one_device(device), dtype=dtype, mmap=mmap)
        made: Own = hub.load(folder, options, lambda tree: class_of(tree, cls, path, "load")).eval()
        return made

    def find_tokenizer(self, tokenizer: Tokenizer | None) -> Any:
        """Returns the given tokenizer, else the one that the config names, else None.

        If the named tokenizer is not found, returns None with a warning; raises ValueError if `d_vocab` is also unknown.
        """
        if tokenizer is not None or not self.cfg.tokenizer_name:
            return tokenizer
        try:
            return hub.named_tokenizer(self.cfg.tokenizer_name)
        except (ValueError, OSError) as error:
            if self.cfg.d_vocab == -1:
                raise ValueError(
                    f"d_vocab is missing, and the tokenizer that says it was not found: {error}"
                ) from error
            warn_caller(f"the model has no tokenizer: {error}; give one with set_tokenizer")
            return None


class HookedTransformer(PretrainedModel, Decoder):
    """A decoder-only transformer in which every intermediate value has a name.

    `HookedTransformer.from_pretrained(name)` loads a checkpoint; `HookedTransformer(cfg)` builds a new model from a
    `HookedTransformerConfig` (or a dict of its flat names).

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> logits, cache = model.run_with_cache("The capital of France is")
    >>> cache["pattern", 0].shape == (1, model.cfg.n_heads, logits.shape[1], logits.shape[1])
    True
    """

    dataset: Any = None  # set by `load_sample_training_dataset`

    def load_sample_training_dataset(self, **kwargs: Any) -> Any:
        """Loads about 10,000 texts similar to the model's training data into `dataset`; see `hooked_lm.hub.datasets`.

        Raises ValueError for an architecture without a known dataset.
        """
        known = datasets.TRAINED_ON
        if self.cfg.original_architecture not in known:
            raise ValueError(
                f"no sample is known of what a {self.cfg.original_architecture} was trained on, only for {', '.join(known)}; "
                "set model.dataset to texts of your own"
            )
        self.dataset = datasets.get_dataset(known[self.cfg.original_architecture], **kwargs)
        return self.dataset

    def sample_datapoint(
        self, tokenize: bool = False, prepend_bos: bool | None = None, padding_side: str | None = None
    ) -> str | Int[Tensor, "1 pos"]:
        """A random text of `dataset`, or its tokens [1, pos], by torch's global generator. Loads the dataset, from the hub."""
        texts = self.dataset if self.dataset is not None else self.load_sample_training_dataset()
        text = texts[int(torch.randint(len(texts), ()))]["text"]
        return self.to_tokens(text, prepend_bos, padding_side) if tokenize else text


class HookedEncoder(PretrainedModel, Encoder):
    """An encoder (BERT and similar) in which every intermediate value has a name.

    `HookedEncoder.from_pretrained(name)` loads a checkpoint with its heads; `HookedEncoder(cfg)` builds a new BERT from a
    `HookedEncoderConfig` (or a dict of its flat names). Heads that the model lacks are None: `mlm_head` with `unembed`,
    `pooler`, `nsp_head`, `classifier`, `token_classifier`, `contact_head`.

    >>> import torch
    >>> from hooked_lm import HookedEncoder
    >>> model = HookedEncoder(
    ...     dict(n_layers=2, d_model=16, n_heads=2, n_ctx=32, d_vocab=10, act_fn="gelu")
    ... )
    >>> logits, cache = model.run_with_cache(torch.tensor([[5, 3, 1]]))
    >>> logits.shape, cache["pattern", 1].shape, cache["pooler.hook_pooler_out"].shape
    (torch.Size([1, 3, 10]), torch.Size([1, 2, 3, 3]), torch.Size([1, 16]))
    """


class HookedEncoderDecoder(PretrainedModel, EncoderDecoder):
    """An encoder-decoder transformer in which every intermediate value has a name.

    `HookedEncoderDecoder.from_pretrained(name)` loads a checkpoint (T5, BART, Marian ...); `HookedEncoderDecoder(cfg)`
    builds a new T5 from a `HookedEncoderDecoderConfig` (or a dict of its flat names). Sites are `encoder.{i}...` and
    `decoder.{i}...`; `hook_encoder_out` is the input of the decoder's cross-attention.

    >>> import torch
    >>> from hooked_lm import HookedEncoderDecoder
    >>> cfg = dict(
    ...     n_layers=2,
    ...     d_model=16,
    ...     n_heads=2,
    ...     n_ctx=32,
    ...     d_vocab=10,
    ...     act_fn="relu",
    ...     decoder_start_token_id=0,
    ... )
    >>> model = HookedEncoderDecoder(cfg)
    >>> logits, cache = model.run_with_cache(
    ...     torch.tensor([[5, 3, 1]]), torch.tensor([[0, 7]])
    ... )
    >>> logits.shape, cache["decoder.1.cross_attn.hook_pattern"].shape
    (torch.Size([1, 2, 10]), torch.Size([1, 2, 2, 3]))
    """


class HookedVisionEncoder(PretrainedModel, VisionEncoder):
    """A vision tower (ViT, the tower of CLIP, and similar) in which every intermediate value has a name.

    `HookedVisionEncoder.from_pretrained(name)` loads a checkpoint with its heads; `HookedVisionEncoder(cfg)` builds a new ViT
    from a `HookedVisionConfig` (or a dict of its flat names). `batch` are images; `pos` are class tokens, then patches row by
    row. Heads that the model lacks are None: `pooler`, `projection`, `classifier`.

    >>> import torch
    >>> from hooked_lm import HookedVisionEncoder
    >>> cfg = dict(
    ...     n_layers=2,
    ...     d_model=16,
    ...     n_heads=2,
    ...     image_size=8,
    ...     patch_size=4,
    ...     act_fn="gelu",
    ...     n_classes=3,
    ... )
    >>> model = HookedVisionEncoder(cfg)
    >>> logits, cache = model.run_with_cache(torch.zeros(1, 3, 8, 8))
    >>> logits.shape, cache["pattern", 1].shape
    (torch.Size([1, 3]), torch.Size([1, 2, 5, 5]))
    """


class HookedVisionLanguage(HookedTransformer, VisionLanguage):
    """A vision-language model in which every intermediate value has a name: a HookedTransformer that reads images too.

    `HookedVisionLanguage.from_pretrained(name)` loads a checkpoint. Sites of the decoder have their usual names; those of the
    tower begin with "vision.".
    """


HookedVLM = HookedVisionLanguage
"""A short name of `HookedVisionLanguage`."""


class HookedDualEncoder(PretrainedModel, DualEncoder):
    """A tower for images and one for texts (CLIP, SigLIP) and their similarity, in which every intermediate value has a name.

    `HookedDualEncoder.from_pretrained(name)` loads a checkpoint. Sites of the towers begin with "vision." and "text.";
    `hook_image_embeds`, `hook_text_embeds` and `hook_logits_per_image` are those of the whole.
    """


CLASSES: dict[type, type[Any]] = {
    DecoderConfig: HookedTransformer,
    EncoderConfig: HookedEncoder,
    EncoderDecoderConfig: HookedEncoderDecoder,
    VisionConfig: HookedVisionEncoder,
    VisionLanguageConfig: HookedVisionLanguage,
    DualEncoderConfig: HookedDualEncoder,
}
READ_IMAGES = (HookedVisionLanguage, HookedVisionEncoder, HookedDualEncoder)


def class_of(
    tree: Tree,
    cls: type[Own] | None = None,
    model_name: str | os.PathLike[str] = "this checkpoint",
    loader: str = "from_pretrained",
) -> type[Own]:
    """The model class of a tree, or `cls` if it is a subclass of that class. Raises ValueError for any other `cls`."""
    known = CLASSES[type(tree)]
    if cls is None or issubclass(cls, known):
        return cls or known
    raise ValueError(f"{model_name} is not a {cls.__name__}: load it with {known.__name__}.{loader}")


def from_pretrained(
    model_name: str | os.PathLike[str] | None = None,
    fold_ln: bool = True,
    center_writing_weights: bool = True,
    center_unembed: bool = True,
    refactor_factored_attn_matrices: bool = False,
    checkpoint_index: int | None = None,
    checkpoint_value: int | None = None,
    hf_model: nn.Module | None = None,
    device: Device | None = None,
    n_devices: int = 1,
    tokenizer: Tokenizer | None = None,
    move_to_device: bool = True,
    fold_value_biases: bool = True,
    default_prepend_bos: bool | None = None,
    default_padding_side: str | None = None,
    dtype: torch.dtype | str = torch.float32,
    first_n_layers: int | None = None,
    n_ctx: int | None = None,
    *,
    cls: type[Own] | None = None,
    device_map: Device | Mapping[str, Device] | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    revision: str | None = None,
    local_files_only: bool = False,
    mmap: bool = True,
    quantize: str | None = None,
    **hf_kwargs: Any,
) -> Own:
    """Loads a checkpoint as a HookedTransformer, HookedEncoder or HookedEncoderDecoder, depending on its architecture.

    On the CPU and in the checkpoint's dtype, weights are views of the memory-mapped file and are not copied until they are
    changed. Folding and other dtypes copy the weights that they change. TransformerLens checkpoints, whose configs have flat
    names, are supported too; see `hooked_lm.hub.tl_checkpoint`. Of a composite that reads images or sounds besides text, the
    language model is loaded, on text alone; what was left out is logged and in `cfg.left_out`. Weights of a quantised checkpoint
    are dequantised as they are read, or later (`quantize`); how they were quantised is logged and in `cfg.dequantized_from`.

    >>> from hooked_lm import pretrained
    >>> model = pretrained.from_pretrained("demo")
    >>> model.cfg.original_architecture
    'GPT2LMHeadModel'

    Args:
        model_name: a hub id, a local directory, a short name such as "gpt2-small", or "demo". A Path, and a string such as
            "./demo", is always a directory. None: that of `hf_model`.
        fold_ln, center_writing_weights, center_unembed, refactor_factored_attn_matrices, fold_value_biases: changes to a
            decoder's weights that keep its predictions; see `hooked_lm.models.weights.fold`.
        checkpoint_index, checkpoint_value: a published checkpoint of a training run, by its index or its training step or
            token count (Pythia, Stanford CRFM's GPT-2, and TransformerLens models with a folder `checkpoints`).
        hf_model: a transformers or PEFT model whose weights are copied instead; it is not changed.
        device: by default the first GPU, else the CPU.
        device_map, max_memory: blocks on several devices: "auto", "balanced", "balanced_low_0" or "sequential" (needs accelerate,
            which reads `max_memory`), or a dict such as {"": 0, "blocks.1": 1, "blocks.2": "cpu", "blocks.3": "disk"}, of which
            weights on the last two are copied to the model's device when it computes with them; see docs/scale.md.
        n_devices: "balanced" over this many GPUs.
        default_prepend_bos: the default of `prepend_bos`; None means that of the family.
        tokenizer: replaces the checkpoint's.
        move_to_device: False leaves the weights on the CPU.
        dtype: of the weights; "auto" for the checkpoint's own.
        first_n_layers: the number of layers to load; later layers are left out.
        n_ctx: the longest prompt, instead of the checkpoint's.
        mmap: False copies the weights into memory, so that the files may be changed or deleted.
        quantize: "keep" leaves the quantised weights of a checkpoint as they are in the file, and dequantises each when it is
            used, to the same values; see docs/scale.md. They cannot be folded, trained or saved. None dequantises them at once.
        cls: the required class of the model; ValueError if the checkpoint is of another class.
        hf_kwargs: fields of the HF config to override (not of a composite), or `token`, `cache_dir`, `force_download`.

    Raises:
        ValueError: a model type that is not supported, a config field that the family does not read, weights that do not
            fit, an unsupported option.
        TypeError: an option that is neither an argument nor a field of the checkpoint's config.
    """
    dtype = hf_kwargs.pop("torch_dtype", dtype)
    several = placement(device, device_map, max_memory, n_devices, move_to_device)
    rewrites = (fold_ln, center_writing_weights, center_unembed, fold_value_biases)
    options = Options(
        hf_model=hf_model,
        checkpoint_index=checkpoint_index,
        checkpoint_value=checkpoint_value,
        revision=revision,
        local_files_only=local_files_only,
        hf_kwargs=hf_kwargs,
        tokenizer=tokenizer,
        device="cpu" if several is not None else one_device(device, device_map, move_to_device),
        placement=several,
        dtype=dtype,
        first_n_layers=first_n_layers,
        n_ctx=n_ctx,
        default_prepend_bos=default_prepend_bos,
        default_padding_side=default_padding_side,
        mmap=mmap,
        quantize=quantize,
        rewritten=any((*rewrites, refactor_factored_attn_matrices)),
        reads_images=next((known.__name__ for known in READ_IMAGES if cls and issubclass(cls, known)), None),
    )
    model_name = hub.checked_name(model_name, hf_model)
    model = hub.load(model_name, options, lambda tree: class_of(tree, cls, model_name))
    if isinstance(model, Decoder):
        process_weights(model, *rewrites, refactor_factored_attn_matrices)
    return model.eval()


def from_pretrained_no_processing(
    model_name: str | os.PathLike[str] | None = None,
    fold_ln: bool = False,
    center_writing_weights: bool = False,
    center_unembed: bool = False,
    refactor_factored_attn_matrices: bool = False,
    fold_value_biases: bool = False,
    *,
    cls: type[Own] | None = None,
    **kwargs: Any,
) -> Own:
    """Like `from_pretrained`, with the checkpoint's weights unchanged."""
    return from_pretrained(
        model_name,
        fold_ln=fold_ln,
        center_writing_weights=center_writing_weights,
        center_unembed=center_unembed,
        refactor_factored_attn_matrices=refactor_factored_attn_matrices,
        fold_value_biases=fold_value_biases,
        cls=cls,
        **kwargs,
    )


answer_keywords(__name__)
