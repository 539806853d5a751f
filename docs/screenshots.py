"""Takes the screenshots of the demo report, light and dark, with chromium; without it the committed ones stay.

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

IMAGES = {"light": "demo.png", "dark": "demo-dark.png"}
SCHEMES = {"light": "--blink-settings=preferredColorScheme=1", "dark": "--blink-settings=preferredColorScheme=0"}
SIZE = (1100, 1300)
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-background-networking")


def take(page: Path, image: Path, browser: str, scheme: str) -> None:
    """Opens a page without a window, and saves what it shows, compressed as well as it can be without a loss."""
    shown = ["--virtual-time-budget=8000", f"--window-size={SIZE[0]},{SIZE[1]}", f"--screenshot={image}", page.as_uri()]
    subprocess.run([browser, *FLAGS, SCHEMES[scheme], *shown], check=True, capture_output=True, timeout=120)
    with Image.open(image) as picture:
        opaque = picture.convert("RGB")
    opaque.save(image, optimize=True)


def main() -> None:
    """Writes docs/images/demo.png, and its dark twin."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        print(f"no chromium: {', '.join(IMAGES.values())} stay as they are (Debian: apt-get install chromium)")
        return
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "demo.html"
        write_report(run(HookedTransformer.from_pretrained("demo"), prompt_pairs(8)), page)
        for scheme, name in IMAGES.items():
            take(page, Path(__file__).with_name("images") / name, browser, scheme)


if __name__ == "__main__":
    main()
