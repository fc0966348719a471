"""Storage tiers: places that keep bytes under keys. Nothing here knows what the bytes mean."""
