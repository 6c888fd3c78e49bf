"""What `megatron-ext report` makes of the traces of a run."""
