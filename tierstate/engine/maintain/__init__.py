"""Maintenance of tiers: prune, garbage collection, repacking, removal of versions, markers and keys by hand."""
