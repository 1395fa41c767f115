"""Turn the files of documentation packages into plain text, one reader per format.

Readers take the decoded text of one file and return its documents: most formats hold one, a dictionary holds
thousands of entries and is cut into blocks of `DICT_BLOCK_CHARS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser

DICT_BLOCK_CHARS = 6000  # several entries per document: longer than a training sequence, short enough to split well

_SKIPPED = {"script", "style", "head", "nav", "svg", "info", "footer"}
_BLOCK = re.compile(
    "p|div|li|ul|ol|dl|dt|dd|tr|table|pre|section|title|item|steps|note|h[1-6]|br|hr|blockquote|article|screen"
)


class _Text(HTMLParser):
    """Collects the text of HTML or Mallard XML; `pre` keeps its line breaks, everything else flows."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.skip_depth = 0
        self.pre_depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.skip_depth += tag in _SKIPPED
        self.pre_depth += tag == "pre"
        if _BLOCK.fullmatch(tag):
            self.parts.append("\n")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.parts += ["\n"] if _BLOCK.fullmatch(tag) else []

    def handle_endtag(self, tag: str) -> None:
        self.skip_depth = max(0, self.skip_depth - (tag in _SKIPPED))
        self.pre_depth = max(0, self.pre_depth - (tag == "pre"))
        if _BLOCK.fullmatch(tag):
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.skip_depth:
            self.parts.append(data if self.pre_depth else re.sub(r"\s+", " ", data))


def html(text: str) -> list[str]:
    """Text of an HTML or Mallard page without navigation, scripts and metadata."""
    parser = _Text()
    parser.feed(text)
    parser.close()
    return [tidy("".join(parser.parts))]


_ROFF_ESCAPES = (
    (re.compile(r'\\".*$', re.M), ""),  # comment
    (re.compile(r"\\f(\[[^\]]*\]|\(..|.)"), ""),  # font
    (re.compile(r"\\s[-+]?\d+|\\[,/&|^:%)]|\\c$", re.M), ""),  # size, kerning and other zero-width marks
    (re.compile(r"\\\*\(lq|\\\*\(rq|\\\(lq|\\\(rq|\\\(dq|\\\[dq\]"), '"'),
    (re.compile(r"\\\(aq|\\\[aq\]|\\\(cq|\\\(oq|\\`|\\'"), "'"),
    (re.compile(r"\\\(em|\\\[em\]|\\\(en|\\\[en\]"), "--"),
    (re.compile(r"\\\(bu|\\\[bu\]"), "*"),
    (re.compile(r"\\\(ha|\\\[ha\]"), "^"),
    (re.compile(r"\\\(ti|\\\[ti\]"), "~"),
    (re.compile(r"\\\(co|\\\[co\]"), "(c)"),
    (re.compile(r"\\\*?\(..|\\\*?\[[^\]]*\]|\\[*]."), ""),  # any other named character or string
    (re.compile(r"\\[ ~0]"), " "),
    (re.compile(r"\\e|\\\(rs|\\\\"), "\\\\"),
    (re.compile(r"\\([-.])"), r"\1"),
)
_ROFF_TEXT = re.compile(
    "B|I|BR|RB|IR|RI|BI|IB|SM|SB|TP|SH|SS|IP|PP|P|LP|UR|MT|Nm|Nd|Fl|Ar|Op|Xr|Sh|Ss|It|Pp|Dv|Va|F[atn]|Em|Li|Pa"
)
_ROFF_BREAK = {"SH", "SS", "PP", "P", "LP", "TP", "IP", "Sh", "Ss", "It", "Pp"}


def man(text: str) -> list[str]:
    """Text of a manual page without tables, equations and fonts; pages that only refer elsewhere give none."""
    text = re.sub(r"^\.TS$.*?^\.TE$|^\.EQ$.*?^\.EN$|^\.ig$.*?^\.\.$|^\.de .*?^\.\.$", "", text, flags=re.S | re.M)
    lines: list[str] = []
    for raw in text.splitlines():
        if not raw.startswith((".", "'")):
            lines.append(raw)
            continue
        name, _, rest = raw[1:].strip().partition(" ")
        if name == "so":
            return []
        if name in _ROFF_BREAK:
            lines.append("")
        if _ROFF_TEXT.fullmatch(name) and rest:
            words = [a or b for a, b in re.findall(r'"([^"]*)"|(\S+)', rest)]
            joined = name in {"BR", "RB", "IR", "RI", "BI", "IB"}  # alternating fonts: no space between the arguments
            lines.append(("" if joined else " ").join(words[:1] if name == "IP" else words))
    out = "\n".join(lines)
    for pattern, replacement in _ROFF_ESCAPES:
        out = pattern.sub(replacement, out)
    return [tidy(out)]


def pod(text: str) -> list[str]:
    """Text of Perl's documentation format: directives keep their words, `X<...>` codes their content."""
    text = re.sub(r"^=(over|back|cut|encoding|begin|end|for|pod).*$", "", text, flags=re.M)
    text = re.sub(r"^=(head\d|item) *", "", text, flags=re.M)
    text = re.sub(r"X<[^<>]*>", "", text)
    text = re.sub(r"[A-Z]<<+ (.*?) >>+", r"\1", text)
    for _ in range(3):  # codes nest; three levels cover what occurs
        text = re.sub(r"[BCEFILSZ]<([^<>]*)>", r"\1", text)
    return [tidy(text)]


def markdown(text: str) -> list[str]:
    """Markdown without emphasis marks and link targets."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return [tidy(re.sub(r"\*\*|(?<!\w)_|_(?!\w)", "", text))]


def plain(text: str) -> list[str]:
    """Text that is text already: source code, reStructuredText, help files."""
    return [text.strip() + "\n"]


def dictd(text: str) -> list[str]:
    """Entries of a dictd database in blocks of about `DICT_BLOCK_CHARS`; an entry starts at a line without indent."""
    blocks: list[str] = []
    current: list[str] = []
    size_chars = 0
    for line in text.splitlines():
        if size_chars >= DICT_BLOCK_CHARS and line and not line[0].isspace():
            blocks.append("\n".join(current).strip() + "\n")
            current, size_chars = [], 0
        if line.strip() != "[1913 Webster]":  # a source mark after every sense would be a tenth of the text
            current.append(line)
            size_chars += len(line) + 1
    return [*blocks, "\n".join(current).strip() + "\n"]


def bible(text: str) -> list[str]:
    """Chapters, from lines `John3:16 For God so ...` as `bible-kjv` prints them; verse numbers are dropped."""
    chapters: dict[str, list[str]] = {}
    for line in text.splitlines():
        match = re.match(r"(\d?[A-Za-z]+\d+):\d+ (.*)", line)
        if match:
            chapters.setdefault(match.group(1), []).append(match.group(2))
    return ["\n".join(verses) + "\n" for verses in chapters.values()]


def tidy(text: str) -> str:
    """Strip trailing blanks, and allow one blank line between paragraphs."""
    text = re.sub(r"[ \t\r\f]+$", "", text, flags=re.M)
    text = re.sub(r"^ +(?=\S)", lambda m: m.group() if len(m.group()) > 1 else "", text, flags=re.M)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


READERS: dict[str, Callable[[str], list[str]]] = {
    "html": html,
    "man": man,
    "pod": pod,
    "markdown": markdown,
    "plain": plain,
    "dictd": dictd,
    "bible": bible,
}
