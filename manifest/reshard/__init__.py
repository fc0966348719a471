"""Resharding: which stored chunks overlap which wanted boxes, and whether the boxes are covered exactly once."""
