"""The history as an SVG file, for a page: `python -m examples.feeds --picture timeline.svg`.

Its colours follow the reader's light or dark mode, and it brings its own background, so that they fit in each case.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from xml.etree import ElementTree as ET

from .history import History, Row, Run

LEFT, TOP, RIGHT = 128, 84, 28
"""Pixels beside, and above, the rows."""

SECOND = 40
ROW, BAR, SKIP = 40, 17, 9
"""Pixels of a row, and of a bar and of a skip in it."""

BELOW = 66
AXIS_EVERY = 2
FONT = 12
NARROWEST = 12
"""Pixels of a bar that has room for the number of its process."""

STYLE = """
text { font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
.title { font-size: 15px; font-weight: 600 }
.dim { fill: #59636e }
.number { fill: #ffffff; font-size: 11px; text-anchor: middle }
.page { fill: #ffffff; stroke: #d1d9e0 }
.grid { stroke: #d1d9e0 }
.run { fill: #1a7f37 }
.again { fill: #0969da }
.killed, .failed { fill: #cf222e }
.skip { stroke: #9a6700; stroke-width: 1.6; fill: none }
.kill { stroke: #cf222e; stroke-width: 1.6; stroke-dasharray: 4 3; fill: none }
.cross { stroke: #cf222e; stroke-width: 3; fill: none }
.overlap { stroke: #8250df; stroke-width: 3; fill: none }
.loud { fill: #cf222e; font-weight: 600 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .dim { fill: #9198a1 }
  .number { fill: #ffffff }
  .page { fill: #0d1117; stroke: #30363d }
  .grid { stroke: #30363d }
  .run { fill: #238636 }
  .again { fill: #1f6feb }
  .killed, .failed { fill: #da3633 }
  .skip { stroke: #d29922 }
  .kill, .cross { stroke: #ff7b72 }
  .overlap { stroke: #bc8cff }
  .loud { fill: #ff7b72 }
}
"""


@dataclass(frozen=True)
class Sign:
    """A sign of the legend.

    Attributes:
        style: the class of its shape.
        words: what it stands for.
        room: pixels to the next one.
    """

    style: str
    words: str
    room: int


LEGEND = (
    Sign("run", "run, with the number of its process", 258),
    Sign("skip", "skipped: the key is held", 186),
    Sign("killed", "killed run", 102),
    Sign("again", "the next run of this key", 180),
    Sign("overlap", "overlap", 80),
)


def draw(history: History) -> str:
    """The whole job as the text of an SVG file.

    Args:
        history: everything that happened.
    """
    return _Drawing(history).text()


class _Drawing:
    """Puts shapes where moments and rows are."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._begin = history.begin or 0.0
        numbers = count(1)
        runs = sorted((run for row in history.rows.values() for run in row.runs), key=lambda run: run.start)
        self._numbers: dict[int, int] = {}
        for run in runs:
            if run.pid not in self._numbers:
                self._numbers[run.pid] = next(numbers)
        self._last = max((run.end or run.start for run in runs), default=self._begin)
        self._seconds = int(self._last - self._begin) + 1
        self._bottom = TOP + ROW * len(history.rows)
        size = {"width": LEFT + SECOND * self._seconds + RIGHT, "height": self._bottom + BELOW}
        self._root = ET.Element(
            "svg",
            {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {size['width']} {size['height']}", "role": "img"},
        )
        ET.SubElement(self._root, "title").text = self._title()
        ET.SubElement(self._root, "style").text = STYLE
        self._shape("rect", "page", x=0.5, y=0.5, width=size["width"] - 1, height=size["height"] - 1, rx=6)

    def text(self) -> str:
        """The file's text."""
        self._words(self._title(), 16, 28, "title")
        self._words("one row per key", 16, TOP - 28, "dim")
        self._axis()
        for number, row in enumerate(self._history.rows.values()):
            self._row(row, TOP + ROW * number)
        self._legend()
        ET.indent(self._root, " ")
        return ET.tostring(self._root, encoding="unicode") + "\n"

    def _title(self) -> str:
        rows = self._history.rows.values()
        ticks, runs, skips, overlaps = (
            sum(len(each) for each in kind)
            for kind in zip(*((row.ticks, row.runs, row.skips, row.overlaps) for row in rows), strict=True)
        )
        return f"{ticks} calls of {len(rows)} keys: {runs} runs, {skips} skips, {overlaps} overlaps"

    def _x(self, at: float) -> float:
        return LEFT + (at - self._begin) * SECOND

    def _shape(self, tag: str, style: str, **attributes: object) -> ET.Element:
        told = {name: f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)
                for name, value in attributes.items()}  # fmt: skip
        return ET.SubElement(self._root, tag, {"class": style, **told})

    def _words(self, words: str, x: float, y: float, style: str = "", **attributes: object) -> None:
        self._shape("text", style, x=x, y=y, **attributes).text = words

    def _axis(self) -> None:
        for second in range(0, self._seconds + 1, AXIS_EVERY):
            x = LEFT + second * SECOND
            self._shape("path", "grid", d=f"M{x} {TOP - 6}V{self._bottom}")
            self._words(f"{second} s", x, self._bottom + 16, "dim", **{"text-anchor": "middle"})

    def _row(self, row: Row, top: int) -> None:
        self._words(row.name, 16, top + BAR - 4)
        again = row.next_after_kill
        for run in row.runs:
            self._bar(run, top, "again" if run is again else "run")
        skips = "".join(_cross(self._x(at), top + BAR + 3 + SKIP / 2, SKIP / 2 - 1) for at in row.skips)
        if skips:
            self._shape("path", "skip", d=skips)
        for at in row.overlaps:
            self._shape("path", "overlap", d=f"M{self._x(at):.1f} {top - 4}v{BAR + 8}")
        if row is self._history.killed_row:
            self._kill(row, top)

    def _bar(self, run: Run, top: int, style: str) -> None:
        end = self._last if run.end is None else run.end
        x, width = self._x(run.start), max((end - run.start) * SECOND, 2.0)
        style = run.outcome if run.outcome in {"killed", "failed"} else style
        self._shape("rect", style, x=x, y=top, width=width, height=BAR, rx=2)
        if width >= NARROWEST:
            self._words(str(self._numbers[run.pid]), x + width / 2, top + BAR - 4.5, "number")

    def _kill(self, row: Row, top: int) -> None:
        """A line down to the end of the run that was killed, and in words how soon the next one began."""
        killed, again = row.killed, row.next_after_kill
        if killed is None or killed.end is None:
            return
        x = self._x(killed.end)
        self._shape("path", "kill", d=f"M{x:.1f} {TOP - 22}V{top - 3}")
        self._shape("path", "cross", d=_cross(x, top + BAR / 2, 6))
        said = f"kill -9 of process {self._numbers[killed.pid]}"
        if again:
            said += f": the next run of {row.name} begins {again.start - killed.end:.1f} s later"
        at_the_left = killed.end - self._begin < self._seconds / 2
        self._words(said, x, TOP - 28, "loud", **{"text-anchor": "start" if at_the_left else "end"})

    def _legend(self) -> None:
        x, y = 16, self._bottom + BELOW - 24
        for sign in LEGEND:
            if sign.style in {"run", "killed", "again"}:
                self._shape("rect", sign.style, x=x, y=y, width=20, height=BAR - 5, rx=2)
            elif sign.style == "skip":
                self._shape("path", "skip", d=_cross(x + 14, y + (BAR - 5) / 2, SKIP / 2 - 1))
            else:
                self._shape("path", "overlap", d=f"M{x + 14} {y - 2}v{BAR - 1}")
            self._words(sign.words, x + 26, y + 10)
            x += sign.room


def _cross(x: float, y: float, half: float) -> str:
    size = f"{2 * half:g}"
    return f"M{x - half:.1f} {y - half:.1f}l{size} {size}m0 -{size}l-{size} {size}"
