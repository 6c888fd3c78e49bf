"""A discrete-event simulation of a pipeline, driven by the arbiter and the hints of the runtime.

Neither Megatron nor torch.distributed is imported here. Times are in any one unit of the user's;
results are in the same unit.
"""
