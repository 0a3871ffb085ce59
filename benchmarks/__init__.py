"""Measurements, each a program of its own; ratios within one run, never absolute times."""
