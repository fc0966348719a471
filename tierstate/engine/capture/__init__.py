"""Capture: plan which bytes of a state are copied, copy and digest them, and prove that nothing changed meanwhile."""
