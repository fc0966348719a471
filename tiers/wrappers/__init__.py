"""Wrapper tiers: retries, rate limits, measurement, deadlines, and the watchdog that deadlines use."""
