"""The few calls of NIXL that the transport makes, and the one place that imports it."""

from __future__ import annotations

import logging
from typing import Any

import torch

from megatron_ext.errors import UsageError


class Agent:
    """NIXL's agent of this process, with its UCX backend; for one thread at a time.

    It has no progress thread: NIXL's Python interface lets that thread spin without a pause.
    `notices` and `done` drive the network instead.

    Args:
        name: Unique among the processes of the run.
        memory: What peers may write into, and what is written from; registered for good.

    Raises:
        UsageError: NIXL or its UCX plugin cannot be used here.
    """

    def __init__(self, name: str, memory: list[torch.Tensor]) -> None:
        nixl = _import_nixl()
        try:
            config = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._agent = nixl.nixl_agent(name, config)
            if "UCX" not in self._agent.backends:
                raise RuntimeError("its UCX plugin is missing")
            if memory:
                self._agent.register_memory(memory)
        except Exception as error:
            raise UsageError(
                f"--rrfp-transport nixl: NIXL does not work on this host ({error}); "
                "use another --rrfp-transport"
            ) from error
        self.metadata: bytes = self._agent.get_agent_metadata()
        """What another agent needs to connect to this one."""

    def connect(self, metadata: bytes) -> str:
        """Get to know another agent by its metadata; returns its name."""
        name = self._agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def prepare(self, peer: str, local: torch.Tensor, address: int, device: int) -> Any:
        """A write of `local` to an address in registered memory of `peer`, to be started often."""
        kind = "VRAM" if local.is_cuda else "DRAM"
        return self._agent.initialize_xfer(
            "WRITE",
            self._agent.get_xfer_descs([local]),
            self._agent.get_xfer_descs([(address, local.nbytes, device)], kind),
            peer,
        )

    def start(self, write: Any, notice: bytes) -> bool:
        """Start a prepared write that is followed by a notification; True if it is complete.

        Raises:
            RuntimeError: The peer cannot be reached any more.
        """
        return self._is_done(self._agent.transfer(write, notice))

    def done(self, write: Any) -> bool:
        """Whether a started write is complete.

        Raises:
            RuntimeError: It failed.
        """
        return self._is_done(self._agent.check_xfer_state(write))

    def release(self, write: Any) -> None:
        """Forget a prepared write that is not under way."""
        self._agent.release_xfer_handle(write)

    def notify(self, peer: str, notice: bytes) -> None:
        """Send a notification to `peer`."""
        self._agent.send_notif(peer, notice)

    def notices(self) -> dict[str, list[bytes]]:
        """Notifications that have come since the last call, by the name of the sender."""
        received = self._agent.get_new_notifs()
        assert isinstance(received, dict)
        return received

    @staticmethod
    def _is_done(state: str) -> bool:
        if state == "ERR":
            raise RuntimeError("the write failed")
        return state == "DONE"


def _import_nixl() -> Any:
    try:
        import nixl
    except ImportError as error:
        raise UsageError(f"--rrfp-transport nixl needs NIXL ({error}): pip install nixl") from None
    # Its loggers tell at level INFO, on standard output, of every agent that is made.
    logger = logging.getLogger("nixl")
    if logger.level in (logging.NOTSET, logging.INFO):
        logger.setLevel(logging.WARNING)
    return nixl
