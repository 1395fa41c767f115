"""Routing traces: the file format (`FORMAT.md`), its reader, writer and validator, and the bundled recordings."""

from traces.format.catalogue import open_trace
from traces.format.reader import Trace
from traces.format.requests import Request, RequestTable

__all__ = ["Request", "RequestTable", "Trace", "open_trace"]
