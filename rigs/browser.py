"""The site in a real browser, on a phone and on a desk, light and dark: nothing is cut off, and all can be read.

    python -m rigs.browser SITE

Pictures of each page go to SITE-pictures. Where there is no Chromium, the check says that it did not run.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

WIDTHS = (390, 1280)
SCHEMES = ("light", "dark")
SMALLEST_TEXT = 8.0
"""Pixels, in a picture as it is shown."""

LOOK = r"""
(async () => {
  for (let frames = 0; frames < 3; frames++) await new Promise(requestAnimationFrame);
  const problems = new Set(), pictures = [];
  const pen = Object.assign(document.createElement("canvas"), {width: 1, height: 1}).getContext("2d");
  const paint = (...colours) => {
    for (const colour of ["white", ...colours]) { pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1); }
    const linear = [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3).map((each) => each / 255)
      .map((each) => (each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4));
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05;
  };
  if (document.documentElement.scrollWidth > innerWidth) problems.add("the page is wider than the screen");
  for (const element of document.querySelectorAll(".content table, .content img")) {
    const frame = element.closest(".table-wrapper") ?? element.parentElement;
    const is_cut_off = frame.scrollWidth > frame.clientWidth || element.getBoundingClientRect().right > innerWidth;
    if (is_cut_off) problems.add(`is cut off: ${element.src ?? element.textContent.trim().slice(0, 60)}`);
    if (element.src) pictures.push([element.src, element.clientWidth, element.naturalWidth]);
  }
  for (const cell of document.querySelectorAll(".content td"))
    if (cell.clientWidth < 40 && cell.textContent.trim().length > 5)
      problems.add(`a column of letters: ${cell.textContent.trim()}`);
  const texts = document.createTreeWalker(document.querySelector(".content"), NodeFilter.SHOW_TEXT);
  for (const shown = document.createRange(); texts.nextNode(); ) {
    shown.selectNode(texts.currentNode);
    if (!texts.currentNode.data.trim() || !shown.getClientRects().length) continue;
    const backs = [], element = texts.currentNode.parentElement, style = getComputedStyle(element);
    for (let each = element; each; each = each.parentElement) backs.unshift(getComputedStyle(each).backgroundColor);
    const [darker, lighter] = [paint(...backs), paint(...backs, style.color)].sort((a, b) => a - b);
    const wanted = parseFloat(style.fontSize) >= 24 ? 3 : 4.5;
    if (style.visibility == "visible" && style.opacity > 0 && lighter / darker < wanted)
      problems.add(`contrast ${(lighter / darker).toFixed(1)}: ${texts.currentNode.data.trim().slice(0, 40)}`);
  }
  const links = [...document.querySelectorAll(".sidebar-tree a.reference")].map((link) => link.href);
  if (new Set(links).size < links.length) problems.add("a page is twice in the sidebar");
  return {problems: [...problems], pictures};
})()
"""


class Browser:
    """A headless Chromium with one page, by its own protocol over two pipes."""

    def __init__(self, program: str, profile: str) -> None:
        options = f"--headless --no-sandbox --hide-scrollbars --remote-debugging-pipe --user-data-dir={profile}"
        # It reads commands from descriptor 3 and answers on descriptor 4.
        command = ["/bin/sh", "-c", f'exec "$0" {options} 3<&0 4>&1 >/dev/null 2>&1', program]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._numbers, self._session, self._unread = count(), {}, b""
        page = self("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]}
        self("Page.enable")

    def __call__(self, method: str, **parameters: Any) -> Any:
        """Send a command; returns its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters, **self._session}
        assert self._process.stdin
        self._process.stdin.write(json.dumps(message).encode() + b"\0")
        self._process.stdin.flush()
        return self._read(lambda answer: answer.get("id") == number)["result"]

    def _read(self, is_wanted: Any) -> Any:
        """The next message of a kind; others are of no interest."""
        assert self._process.stdout
        while True:
            while b"\0" not in self._unread:
                if not (more := os.read(self._process.stdout.fileno(), 1 << 20)):
                    raise EOFError
                self._unread += more
            text, _, self._unread = self._unread.partition(b"\0")
            if is_wanted(answer := json.loads(text)):
                return answer

    def open(self, page: Path) -> None:
        """Open a file, and wait until it is loaded."""
        self("Page.navigate", url=page.resolve().as_uri())
        self._read(lambda answer: answer.get("method") == "Page.loadEventFired")

    def look(self, width: int, scheme: str, picture: Path) -> list[str]:
        """What is wrong with the page on a screen of so many pixels, of which a picture is taken."""
        self("Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=True)
        self("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        looked = self("Runtime.evaluate", expression=LOOK, awaitPromise=True, returnByValue=True)
        found = looked["result"].get("value") or {"problems": [str(looked)], "pictures": []}
        shot = self("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        picture.write_bytes(base64.b64decode(shot))
        return [*found["problems"], *filter(None, (too_small(*each) for each in found["pictures"]))]

    def close(self) -> None:
        """End it."""
        self("Browser.close")
        self._process.communicate()


def too_small(source: str, shown: float, natural: float) -> str | None:
    """What is wrong with the size of a picture, if anything."""
    if not natural:
        return f"is not there: {source}"
    sizes = [float(size) for size in re.findall(r"font(?:-size)?:\s*([\d.]+)px", Path(source[7:]).read_text())]
    box = re.search(r'viewBox="\S+ \S+ (\S+)', Path(source[7:]).read_text())
    assert box
    smallest = min(sizes) * shown / float(box[1])
    return f"text of {smallest:.1f} px in {source}" if smallest < SMALLEST_TEXT else None


def main(site: Path) -> int:
    """Look at each page; returns the exit status."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        print("the check in a browser did not run: there is no chromium")
        return 0
    pictures = site.with_name(f"{site.name}-pictures")
    pictures.mkdir(exist_ok=True)
    pages = sorted(page for page in site.rglob("*.html") if page.stem not in {"genindex", "search"})
    wrong = 0
    with TemporaryDirectory() as profile:
        browser = Browser(program, profile)
        for page in pages:
            browser.open(page)
            for width, scheme in ((width, scheme) for width in WIDTHS for scheme in SCHEMES):
                name = "-".join((*page.relative_to(site).with_suffix("").parts, str(width), scheme))
                problems = browser.look(width, scheme, pictures / f"{name}.png")
                wrong += len(problems)
                for problem in problems:
                    print(f"{page.relative_to(site)} at {width} px, {scheme}: {problem}")
        browser.close()
    print(f"{len(pages)} pages at {WIDTHS} px, {' and '.join(SCHEMES)}: {wrong} problems; pictures in {pictures}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
