"""Answers as HTML: one self-contained page for a run, a comparison, a sweep, a plan, a validation or a calibration."""
