"""GPUs: how fast they compute and what they draw at each clock."""
