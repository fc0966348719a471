"""Save: plan, capture into slabs, encode, write packs, publish the record, cascade to slower tiers."""
