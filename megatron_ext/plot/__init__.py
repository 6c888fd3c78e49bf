"""What `megatron-ext plot` draws: pictures for papers and slides."""
