"""Plain Python values, objects with a state, random generators and values that differ between ranks."""
