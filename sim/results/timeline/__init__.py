"""Runs as trace events, to be looked at in Perfetto: lanes, counters, and arrows from copies to what they were for."""
