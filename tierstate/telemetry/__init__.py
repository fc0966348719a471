"""What a run tells of itself to people and programs: metrics, and the log of events in its tiers."""
