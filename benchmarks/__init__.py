"""Measurements side by side with peers, in one run, as ratios."""
