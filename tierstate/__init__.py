"""tierstate: training state on every tier of a cluster, without stopping the training."""
