"""How long the pages are: the words of each, and its longest sentence.

    python -m benchmarks.words [PAGE ...]

Words are counted as `wc -w` counts them.
Code blocks, comments, table rows, headings and the addresses of links are no sentences.
A piece of code in a sentence is one word.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]

_FENCE = re.compile(r"^ *(`{3,})[^`\n]*\n.*?^ *\1 *$", re.MULTILINE | re.DOTALL)
_UNSEEN = re.compile(r"<!--.*?-->|^\[[\w-]+\]: \S+$", re.MULTILINE | re.DOTALL)
_ROW_OR_HEADING = re.compile(r"^ *[|#].*$", re.MULTILINE)
_CODE = re.compile(r"(`+).*?\1", re.DOTALL)
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")
_END_OF_PARAGRAPH = re.compile(r"\n\s*\n|^ *(?:[-*]|\d+\.) ", re.MULTILINE)
_END_OF_SENTENCE = re.compile(r"(?<=[.!?])[)*_\"]*\s+(?=[^a-z]|only_one)")
_BLANK = "\0"
"""Stands for a blank in code."""


def pages() -> list[Path]:
    """README, the page for contributors, and those of the site."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def longest_sentence(text: str) -> tuple[int, str]:
    """The words of the longest sentence in a Markdown text, and the sentence; "" where there is none."""
    prose = _ROW_OR_HEADING.sub("\n", _UNSEEN.sub("", _FENCE.sub("\n", text)))
    prose = _LINK.sub(r"\1", _CODE.sub(lambda code: _BLANK.join(code[0].split()), prose))
    found = [
        (len(sentence.split()), " ".join(sentence.split()).replace(_BLANK, " "))
        for paragraph in _END_OF_PARAGRAPH.split(prose)
        for sentence in _END_OF_SENTENCE.split(paragraph)
    ]
    return max(found, default=(0, ""))


def main() -> None:
    """Print a line for each page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, help="Markdown files; all pages if not given")
    print(" words  longest sentence, and its words")
    for page in parser.parse_args().pages or pages():
        text = page.read_text()
        words, sentence = longest_sentence(text)
        print(f"{len(text.split()):6}  {os.path.relpath(page, ROOT)} {words}: {sentence}")


if __name__ == "__main__":
    main()
