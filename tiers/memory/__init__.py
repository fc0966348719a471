"""Memory: the arena of slabs, the host, memory and gpu tiers, and fast copies between addresses."""
