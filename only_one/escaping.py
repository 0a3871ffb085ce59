"""Texts as they stand in a key: no two are spelt alike, and none is overlong."""

from __future__ import annotations

import re

from .encoding import digest

LONGEST = 200
"""Characters of one text beyond which it is cut to a head and digested."""

_HEAD = 40
_SURROGATES = re.compile("[\ud800-\udfff]")  # in names of files that are not UTF-8; no client could send them

ALWAYS = frozenset("{}%")
"""What is escaped wherever it stands: braces would move a cluster's keys to other slots than those beside them."""


def escape(text: str, characters: frozenset[str] = ALWAYS) -> str:
    """`text` with each of `characters` spelt as in a URL."""
    if characters.isdisjoint(text) and (text.isascii() or not _SURROGATES.search(text)):
        return text
    return "".join(_percent(each) if each in characters or _SURROGATES.match(each) else each for each in text)


def shorten(text: str) -> str:
    """An escaped text, or where it is overlong its head and its MD5.

    `%~` stands in no escaped text, so what is cut is never spelt like what is not.
    """
    if len(text) <= LONGEST:
        return text
    return f"{text[:_HEAD]}%~{digest(text)}"


def _percent(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "surrogatepass"))
