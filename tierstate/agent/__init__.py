"""The agent: a process beside the trainers of a node that publishes what they have captured, and outlives them."""
