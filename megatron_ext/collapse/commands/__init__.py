"""The subcommands of `megatron-ext collapse`: each has `add_arguments` and `run`."""
