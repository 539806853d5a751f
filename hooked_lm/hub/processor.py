"""The processor of a checkpoint: what makes token ids and pixels of text and pictures, as transformers has it."""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hooked_lm.extras import quiet_torchao
from hooked_lm.models.base import BaseModel
from hooked_lm.models.vision.vision_language import VisionLanguage

if TYPE_CHECKING:
    from transformers import ProcessorMixin
    from transformers.video_processing_utils import BaseVideoProcessor

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")


def give_processor(model: BaseModel, find: Callable[[], tuple[Any, str | None]]) -> None:
    """Gives a model that reads text with images its processor, or the reason why there is none."""
    if isinstance(model, VisionLanguage):
        model.processor, model.why_no_processor = find()


@quiet_torchao()
def processor_in(folder: Path) -> tuple[Any, str | None]:
    """The processor of images and text in a directory, or None; and why there is none, if a file describes one."""
    if not any((folder / file).is_file() for file in PROCESSOR_FILES):
        return None, None
    from transformers import AutoProcessor

    try:
        return AutoProcessor.from_pretrained(folder, trust_remote_code=False, local_files_only=True), None
    except Exception as error:  # of many kinds: packages that are not installed, files that do not fit
        why = f"that in {folder} cannot be made: {' '.join(str(error).split())}"
    if find_spec("torchvision") is None and find_spec("PIL") is not None:
        try:
            return without_videos(folder), None
        except Exception:
            pass
    return None, why


def without_videos(folder: Path) -> Any:
    """The processor of a directory without its part for videos.

    transformers refuses such processors without torchvision, though their other parts need pillow alone.
    """
    import transformers
    from transformers import AutoImageProcessor, AutoTokenizer, ProcessorMixin
    from transformers.video_processing_utils import BaseVideoProcessor

    described, _ = ProcessorMixin.get_processor_dict(folder, local_files_only=True)
    images = AutoImageProcessor.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    files = (folder / file for file in (*PROCESSOR_FILES, "tokenizer_config.json"))
    names = (json.loads(file.read_text(encoding="utf-8")).get("processor_class") for file in files if file.is_file())
    name = next(name for name in names if name)
    kind = getattr(transformers, name)

    def check(processor: "ProcessorMixin", argument_name: str, argument: object) -> Any:
        is_of_videos = argument_name == "video_processor"
        return None if is_of_videos else kind.check_argument_for_proper_class(processor, argument_name, argument)

    def refuse(videos: "BaseVideoProcessor", *args: object, **options: object) -> None:
        raise ImportError("videos need torchvision, which is not installed")

    videos = type("NoVideos", (BaseVideoProcessor,), {"__call__": refuse})(**described.get("video_processor", {}))
    processor: Any = type(name, (kind,), {"check_argument_for_proper_class": check})
    parts = {"image_processor": images, "tokenizer": tokenizer, "video_processor": videos}
    return processor.from_args_and_dict([parts[part] for part in kind.get_attributes()], described)
