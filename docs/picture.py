"""The picture of the README: the report of a GPT of 12 layers on 16 chips, as a browser draws it; `python docs/picture.py` makes it.

Chromium, or Chrome, is looked for on the path; the model is `benchmarks.models`'s.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "_static" / "report.png"
BROWSERS = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome", "chrome")
SIZE = (1180, 1110)  # pixels: the summary, and the timeline


def main() -> None:
    """Searches, writes the report, and has it drawn."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"the picture is drawn by a browser, and none of {', '.join(BROWSERS)} is on the path. Install Chromium.")
    sys.path.insert(0, str(ROOT))
    from PIL import Image  # comes with matplotlib

    import autoshard
    from benchmarks import models

    step, arguments = models.gpt(layers=12, width=2048, batch=16, gathers=False)
    strategy = autoshard.search(step, *arguments, cluster="v5e:4x4", donate_argnums=0)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        strategy.report().save_html(page)
        options = ("--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={SIZE[0]},{SIZE[1]}", f"--screenshot={PICTURE}")
        subprocess.run([browser, *options, page.as_uri()], check=True, stderr=subprocess.DEVNULL)
    Image.open(PICTURE).quantize(256).save(PICTURE, optimize=True)  # 65 kB


if __name__ == "__main__":
    main()
