"""Takes the screenshots of the demo report and of notebooks, light and dark, with chromium; without it the committed ones stay.

`make docs` runs it.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import notebooks  # noqa: E402
from hooks import figure_script  # noqa: E402
from plotly.offline import get_plotlyjs  # noqa: E402

from hooked_lm import HookedTransformer  # noqa: E402
from hooked_lm.demo.experiment import prompt_pairs, run, write_report  # noqa: E402

IMAGES = HERE / "images"
DEMO = {"light": "demo.png", "dark": "demo-dark.png"}
SCHEMES = {"light": "--blink-settings=preferredColorScheme=1", "dark": "--blink-settings=preferredColorScheme=0"}
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-background-networking")
DEMO_SIZE, CARD_SIZE, COLOURS = (1100, 1300), (480, 320), 64
PALETTE = {"light": ("default", "#ffffff"), "dark": ("slate", "#1e2129")}  # of the site: its name and its paper


def take(page: Path, browser: str, scheme: str, size: tuple[int, int]) -> Image.Image:
    """Opens a page without a window, and returns what it shows."""
    image = page.with_suffix(".png")
    shown = ["--virtual-time-budget=8000", f"--window-size={size[0]},{size[1]}", f"--screenshot={image}", page.as_uri()]
    subprocess.run([browser, *FLAGS, SCHEMES[scheme], *shown], check=True, capture_output=True, timeout=120)
    with Image.open(image) as picture:
        return picture.convert("RGB")


def sheet(path: Path, scheme: str) -> dict[str, tuple[int, int, int, int]]:
    """Writes a page with the pictures of all notebooks, one below the other, and returns the box of each on it."""
    boxes, parts, top = {}, [], 0
    for name, notebook in notebooks.all_executed().items():
        output = notebooks.picture(notebook)
        layout = output.data.get(notebooks.FIGURE, {}).get("layout", {})
        wide = (layout.get("width", 0), layout.get("meta", {}).get("min_width", 0), 1.5 * layout.get("height", 0))
        width = int(max(600, *wide))
        height = width * CARD_SIZE[1] // CARD_SIZE[0]
        size = f"width: {width}px; height: {height}px; overflow: hidden; display: grid; align-content: safe center"
        parts.append(f'<div style="{size}"><div>{notebooks.output_to_html(output)}</div></div>')
        boxes[name] = (0, top, width, top + height)
        top += height
    palette, paper = PALETTE[scheme]
    style = f"margin: 0; font: 15px sans-serif; color: #717a8a; background: {paper}; color-scheme: {scheme}"
    body = (
        f'<!DOCTYPE html><meta charset="utf-8"><body data-md-color-scheme="{palette}" style="{style}">{"".join(parts)}'
    )
    path.write_text(f"{body}<script>{get_plotlyjs()}</script><script>{figure_script()}</script>", encoding="utf-8")
    return boxes


def main() -> None:
    """Writes docs/images/demo.png and docs/images/notebooks/*.png, and their dark twins."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        print("no chromium: the images in docs/images/ stay as they are (Debian: apt-get install chromium)")
        return
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        write_report(run(HookedTransformer.from_pretrained("demo"), prompt_pairs(8)), page)
        for scheme, name in DEMO.items():
            take(page, browser, scheme, DEMO_SIZE).save(IMAGES / name, optimize=True)
        for scheme, ending in (("light", ""), ("dark", "-dark")):
            boxes = sheet(page, scheme)
            whole = take(
                page, browser, scheme, (max(box[2] for box in boxes.values()), max(box[3] for box in boxes.values()))
            )
            for name, box in boxes.items():
                card = whole.crop(box).resize(CARD_SIZE, Image.Resampling.LANCZOS)
                card.quantize(COLOURS).save(IMAGES / "notebooks" / f"{name}{ending}.png", optimize=True)


if __name__ == "__main__":
    main()
