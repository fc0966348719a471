"""Policies: from YAML to checked models to opened tiers."""
