"""Save: the pipeline from capture to the commit in every tier, how far copies are behind, alarms, preemption."""
