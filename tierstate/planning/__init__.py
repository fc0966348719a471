"""The planner: what a policy will cost and protect, before a job runs (``tierstate plan``)."""
