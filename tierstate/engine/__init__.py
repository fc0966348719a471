"""The engine: how bytes move between state and tiers, in saves, restores and maintenance."""
