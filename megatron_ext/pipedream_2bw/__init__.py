"""Two buffered weight versions: the pipeline does not drain between batches (PipeDream-2BW)."""
