"""Maintenance of a run: prune, garbage collection, repack, verify, rebuild, copy, tags, forks, comparison."""
