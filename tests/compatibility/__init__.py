"""On every supported Megatron, with its sources from PyPI, and with the patches in them."""
