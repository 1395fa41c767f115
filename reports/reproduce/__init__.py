"""Published figures beside simulated ones: `rows/` holds what papers print, the modules work it out again."""
