"""Bring routing that other programs recorded into the trace format: one module per source, one spool, one writer.

A source module has `NAME`, `TITLE`, `ORIGIN` (what it was built from), `sniff(path, head)` and
`read(path, spool, options)`, which puts tokens into the spool and returns the `Facts` its file tells.
`docs/convert.md` describes every source.
"""

from traces.convert.options import Facts, Options
from traces.convert.run import convert, detect, sources

__all__ = ["Facts", "Options", "convert", "detect", "sources"]
