"""Sharded tensors: which boxes of a global tensor a rank holds, by a mesh, a DTensor, a ShardedTensor or the user."""
