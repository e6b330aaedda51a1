"""Measurements: ratios between contenders in one run, never a pass or a fail."""
