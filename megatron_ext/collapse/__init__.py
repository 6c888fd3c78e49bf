"""Loss curves divided by their final loss: fit them, compare runs with them, see faults early.

After "Scaling with Collapse" (arXiv 2509.25087): runs that share learning-rate schedule, tokens
per parameter (TPP) and AdamW timescale (tau) share one normalised loss curve, whatever their size.
"""
