"""Programs that make what the repository keeps: bundled traces, measured comparisons, pages. Never installed."""
