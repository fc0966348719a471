"""Saves by many ranks: two-phase commit, ownership of replicated shards, versions passed on from host to host."""
