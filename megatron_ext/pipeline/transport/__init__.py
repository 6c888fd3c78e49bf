"""How messages travel between stages."""

from megatron_ext.pipeline.transport.base import Message, Transport, TransportError

__all__ = ["Message", "Transport", "TransportError"]
