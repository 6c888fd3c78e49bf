"""Messages over NCCL: the header over CPU memory, then the tensor from GPU to GPU.

NCCL matches the operations of two ranks in the order in which they are started, whatever they
carry. So every link has a communicator of its own, and the receiver starts a receive only when the
header says that a tensor comes, in the order of the headers. Communicators are made and used once
at the start, in one order on all stages, because they may not be made later in whatever order
messages happen to come.

The tensor channel is a process group that is given to the transport. The tests, which have no
GPU, give it groups of gloo instead of NCCL.
"""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from typing import NamedTuple, override

import torch
import torch.distributed as dist

from megatron_ext.pipeline.task import HEADER_BYTES, Direction, Header, HeaderError
from megatron_ext.pipeline.transport.base import Message, layout_of
from megatron_ext.pipeline.transport.link_threads import LinkThreads, Receive, Send

_TAGS = {Direction.FORWARD: 7011, Direction.BACKWARD: 7012}

_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 20e-6, 200e-6


class Channel(NamedTuple):
    """The tensor channel of one link."""

    group: dist.ProcessGroup
    peer: int
    """Rank of the neighbour in `group`."""


class NcclTransport(LinkThreads):
    """The links of one stage over NCCL.

    Args:
        group: A gloo group of the pipeline's ranks for the headers, used by nothing else.
        channels: What `open_channels` gives, by direction and whether this end sends.
        sources: Rank in `group` to receive from, per direction.
        destinations: Rank in `group` to send to, per direction.
        capacity: Receive buffers per direction.
        device: Where tensors are.
        timeout_s: Seconds after which a tensor whose header has come is an error.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        channels: dict[tuple[Direction, bool], Channel],
        *,
        sources: dict[Direction, int],
        destinations: dict[Direction, int],
        capacity: int,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        super().__init__(sources=sources, destinations=destinations, capacity=capacity)
        self._group = group
        self._channels = channels
        self._device = device
        self._timeout_s = timeout_s
        self._start()

    @override
    def _receiver(self, direction: Direction, peer: int) -> Receive:
        channel = self._channels[direction, False]
        return _End(self._group, peer, direction, channel, self._device, self._timeout_s).receive

    @override
    def _sender(self, direction: Direction, peer: int) -> Send:
        channel = self._channels[direction, True]
        return _End(self._group, peer, direction, channel, self._device, self._timeout_s).send


def open_channels(
    group: dist.ProcessGroup,
    *,
    sources: dict[Direction, int],
    destinations: dict[Direction, int],
    device: torch.device,
    timeout_s: float,
    backend: str = "nccl",
) -> dict[tuple[Direction, bool], Channel]:
    """Make a communicator for every link and send one byte through each.

    All stages of the pipeline call this at about the same time. There are six rounds, one for each
    direction and colour of link, and links of one colour share no stage: nobody waits for a stage
    that is in another round.

    Args:
        group: The group that the ranks in `sources` and `destinations` count in.
        sources: Group rank to receive from, per direction.
        destinations: Group rank to send to, per direction.
        device: Where tensors are.
        timeout_s: Seconds after which a communicator gives up.
        backend: Of the communicators.
    """
    ranks = dist.get_process_group_ranks(group)
    mine = group.rank()
    channels = {}
    for direction in Direction:
        links = [(mine, peer) for peer in _peers(destinations, direction)]
        links += [(peer, mine) for peer in _peers(sources, direction)]
        by_colour = {_colour(*link, direction, len(ranks)): link for link in links}
        for colour in range(3):
            # A stage without such a link makes a group of its own: PyTorch derives a group's name
            # from the number of groups that its members have made, which must stay the same.
            link = by_colour.get(colour, (mine,))
            pair = dist.new_group(
                sorted(ranks[stage] for stage in link),
                # The transport's own limit, which names the stage, comes first.
                timeout=timedelta(seconds=2 * timeout_s),
                backend=backend,
                use_local_synchronization=True,
                group_desc=f"RRFP_{direction.name}",
            )
            assert isinstance(pair, dist.ProcessGroup)
            if len(link) == 2:
                sending = link[0] == mine
                channel = channels[direction, sending] = Channel(pair, 1 - pair.rank())
                byte = torch.zeros(1, dtype=torch.uint8, device=device)
                (pair.send if sending else pair.recv)([byte], channel.peer, 0).wait()
    return channels


def _peers(ends: dict[Direction, int], direction: Direction) -> list[int]:
    return [ends[direction]] if direction in ends else []


def _colour(sender: int, receiver: int, direction: Direction, depth: int) -> int:
    """0 and 1 by turns along the pipeline, and 2 from the last stage back to the first."""
    earlier = sender if direction is Direction.FORWARD else receiver
    return 2 if earlier == depth - 1 else earlier % 2


class _End:
    """One end of a link, in the link's thread."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        peer: int,
        direction: Direction,
        channel: Channel,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self._group = group
        self._peer = peer
        self._direction = direction
        self._channel = channel
        self._device = device
        self._timeout_s = timeout_s
        self._header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        self._header_bytes = memoryview(self._header.numpy())
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            torch.cuda.set_device(device)
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def receive(self) -> Message:
        """Wait for the next message."""
        self._group.recv([self._header], self._peer, _TAGS[self._direction]).wait()
        header = Header.unpack(self._header_bytes)
        if header.direction is not self._direction:
            raise HeaderError(f"a {header.direction.payload} on the link of {self._direction.name}")
        layout = layout_of(header)
        if layout is None:
            return Message(header, None)
        with self._on_stream():
            memory = torch.empty(layout.nbytes, dtype=torch.uint8, device=self._device)
            if layout.nbytes:
                self._finish(self._channel.group.recv([memory], self._channel.peer, 0))
        return Message(header, memory.view(layout.dtype).view(layout.shape))

    def send(self, message: Message, produced: torch.cuda.Event | None) -> None:
        """Send a message and wait until it has been received."""
        header, tensor, _ = message
        if produced is not None:
            # Before the header: the neighbour's receive occupies its GPU from then on.
            self._wait_for(produced)
        self._header_bytes[:] = header.pack()
        # And the header before the tensor: our send occupies our GPU until it is received.
        self._group.send([self._header], self._peer, _TAGS[self._direction]).wait()
        if tensor is not None and tensor.numel():
            with self._on_stream():
                data = tensor.to(self._device).contiguous().view(-1).view(torch.uint8)
                self._finish(self._channel.group.send([data], self._channel.peer, 0))

    def _on_stream(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext()

    def _finish(self, work: dist.Work) -> None:
        """Wait until a transfer is complete on the device."""
        work.wait()  # for NCCL this only makes the stream wait
        if self._stream is not None:
            self._wait_for(self._stream.record_event())

    def _wait_for(self, event: torch.cuda.Event) -> None:
        started, pause = time.monotonic(), _SHORTEST_SLEEP_S
        while not event.query():  # type: ignore[no-untyped-call]
            if time.monotonic() - started > self._timeout_s:
                raise TimeoutError(f"the GPU was not done with it in {self._timeout_s:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_SLEEP_S)
