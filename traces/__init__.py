"""Routing traces: the file format (`FORMAT.md`), its reader, writer and validator, and the bundled recordings."""
