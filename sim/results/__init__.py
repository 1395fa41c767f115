"""From counts to answers: metrics, tables, timelines, and the text that people read."""
