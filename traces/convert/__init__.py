"""Bring routing that other programs recorded into the trace format: readers of logs, one spool, one writer.

A reader is a `Source` (`options`): how a log is told by its content, what it never tells, and `read(path, spool,
options)`, which puts tokens into the spool and returns the `Facts` its file tells. `docs/convert.md` describes every
source.
"""

from traces.convert.options import Facts, Options
from traces.convert.run import convert, detect, sources

__all__ = ["Facts", "Options", "convert", "detect", "sources"]
