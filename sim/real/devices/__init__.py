"""Devices that real runs and calibration compute and copy on: streams, marks, memory, the copy queue before them."""
