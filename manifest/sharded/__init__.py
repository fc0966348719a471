"""Versions of many ranks: each rank's part, the merge of all parts, and which rank saves a replicated shard."""
