"""Routing traces: the file format (`FORMAT.md`), its reader, writer and validator, and the bundled recordings."""

from traces.catalogue import default_trace, open_trace
from traces.reader import Trace
from traces.requests import Request, RequestTable

__all__ = ["Request", "RequestTable", "Trace", "default_trace", "open_trace"]
