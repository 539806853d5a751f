"""Takes the screenshot of the demo report that README.md shows, with chromium; without it the committed one stays.

`make docs` runs it.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

sys.path.append(str(Path(__file__).parents[1]))

from hooked_lm import HookedTransformer
from hooked_lm.demo.experiment import prompt_pairs, run, write_report

IMAGE = Path(__file__).with_name("images") / "demo.png"
SIZE = (1100, 1300)
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-background-networking")


def take(page: Path, image: Path, browser: str) -> None:
    """Opens a page without a window, and saves what it shows, compressed as well as it can be without a loss."""
    shown = ["--virtual-time-budget=8000", f"--window-size={SIZE[0]},{SIZE[1]}", f"--screenshot={image}", page.as_uri()]
    subprocess.run([browser, *FLAGS, *shown], check=True, capture_output=True, timeout=120)
    with Image.open(image) as picture:
        opaque = picture.convert("RGB")
    opaque.save(image, optimize=True)


def main() -> None:
    """Writes docs/images/demo.png."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        print(f"no chromium: {IMAGE.name} stays as it is (Debian: apt-get install chromium)")
        return
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "demo.html"
        write_report(run(HookedTransformer.from_pretrained("demo"), prompt_pairs(8)), page)
        take(page, IMAGE, browser)


if __name__ == "__main__":
    main()
