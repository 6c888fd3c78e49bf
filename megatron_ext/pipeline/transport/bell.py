"""Doorbells between neighbouring stages: a byte over TCP wakes a thread that sleeps.

A one-sided write arrives without a trace in the receiving process, and asking for it again and
again would take a core and the interpreter's lock away from the compute thread. So a sender also
rings. The connection carries no data; it wakes, and it tells when the process at the other end
dies, since the system then closes it. A host that vanishes closes nothing: every bell is also rung
at intervals, and a neighbour not heard for too long counts as lost.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterable
from typing import NamedTuple

_TOKEN_BYTES = 16
_GREETING = struct.Struct(f"<{_TOKEN_BYTES}sI")
_CONNECT_S = 5.0
_GRACE_S = 1.0

_RING, _STARTED, _ENDED, _ALIVE = b"rsea"


class Address(NamedTuple):
    """Where a process can be rung."""

    hosts: tuple[str, ...]
    port: int
    token: bytes
    """Known only to this pipeline's processes; a connection without it is refused."""


class Doorway:
    """Listens for the bells of lower ranks until `open_bells` has connected them."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("", 0), backlog=64)
        self.address = Address(
            _own_hosts(), self._socket.getsockname()[1], secrets.token_bytes(_TOKEN_BYTES)
        )

    def open_bells(
        self, rank: int, neighbours: Iterable[int], addresses: list[Address], timeout_s: float
    ) -> Bells:
        """Connect to every neighbour; all ranks call this at about the same time.

        Args:
            rank: The caller's rank.
            neighbours: Ranks to connect to.
            addresses: Address of every rank, by rank.
            timeout_s: Seconds after which a neighbour that does not answer is an error, and
                later, after which a neighbour that was not heard of is lost.

        Raises:
            OSError: A neighbour cannot be reached.
        """
        # Higher ranks accept from lower ones before they connect to still higher ones, so no
        # circle of waiting ranks can form.
        deadline = time.monotonic() + timeout_s
        neighbours = sorted(set(neighbours))
        lower = {peer for peer in neighbours if peer < rank}
        sockets: dict[int, socket.socket] = {}
        with self._socket:
            while lower - sockets.keys():
                peer, connection = self._accept(deadline)
                if peer not in lower:
                    connection.close()
                    continue
                connection.sendall(self.address.token)
                sockets[peer] = connection
            for peer in neighbours:
                if peer > rank:
                    sockets[peer] = _connect(rank, peer, addresses[peer], deadline)
        return Bells(sockets, timeout_s)

    def _accept(self, deadline: float) -> tuple[int, socket.socket]:
        """Rank and connection of a caller; rank -1 for a stranger."""
        self._socket.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            connection, _ = self._socket.accept()
        except TimeoutError:
            raise OSError("no connection from the stage before it in time") from None
        connection.settimeout(_CONNECT_S)
        with contextlib.suppress(OSError):
            token, rank = _GREETING.unpack(_read(connection, _GREETING.size))
            if secrets.compare_digest(token, self.address.token):
                return rank, connection
        return -1, connection


class Bells:
    """The connections to all neighbours; for one thread, but for `wake`.

    Attributes:
        ringing: Per neighbour, rings that were heard and not yet answered by the owner, who counts
            them down.
        lost: Neighbours that went away, and why.
    """

    def __init__(self, sockets: dict[int, socket.socket], timeout_s: float) -> None:
        self.ringing = dict.fromkeys(sockets, 0)
        self.lost: dict[int, str] = {}
        self._working = dict.fromkeys(sockets, 0)
        """Per neighbour, pieces of work that it has started and not ended."""
        self._lost_at: dict[int, float] = {}
        self._timeout_s = timeout_s
        # Often enough that one late ring does no harm, seldom enough to cost nothing.
        self._interval_s = min(10.0, timeout_s / 4)
        now = time.monotonic()
        self._heard = dict.fromkeys(sockets, now)
        self._next_alive = now + self._interval_s
        self._sockets = sockets
        self._epoll = select.epoll()
        self._peers: dict[int, int] = {}
        for peer, connection in sockets.items():
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._peers[connection.fileno()] = peer
            self._epoll.register(connection.fileno(), select.EPOLLIN)
        self._wakened, self._waker = socket.socketpair()
        self._wakened.setblocking(False)
        self._waker.setblocking(False)
        self._epoll.register(self._wakened.fileno(), select.EPOLLIN)
        # A forked child, such as a data loader's worker, must not keep the connections open
        # after this process is gone.
        os.register_at_fork(after_in_child=self._close_sockets)

    @property
    def watchful(self) -> bool:
        """Whether some neighbour has rung, or has work under way, and not much is to be slept."""
        return any(
            self.awaited(peer) or (working > 0 and peer not in self.lost)
            for peer, working in self._working.items()
        )

    def awaited(self, peer: int) -> bool:
        """Whether what `peer` rang for is still on its way; not long after the peer is lost."""
        since = self._lost_at.get(peer)
        return self.ringing[peer] > 0 and (since is None or time.monotonic() - since < _GRACE_S)

    def gone(self, peer: int) -> bool:
        """Whether `peer` is lost and nothing more of it can be expected."""
        return peer in self.lost and not self.awaited(peer)

    def ring(self, peer: int) -> None:
        """Tell a neighbour that there is something for it to look at."""
        self._send(peer, _RING)

    def started(self, peer: int) -> None:
        """Tell a neighbour that work is under way that it may have to take part in."""
        self._send(peer, _STARTED)

    def ended(self, peer: int) -> None:
        """Tell a neighbour that such work has ended: a `ring` that takes back a `started`."""
        self._send(peer, _ENDED)

    def wake(self) -> None:
        """End the owner's `wait`; any thread may call this."""
        # A full buffer wakes as well; and a closed one has nobody left to wake.
        with contextlib.suppress(OSError):
            self._waker.send(b"w")

    def wait(self, seconds: float) -> None:
        """Sleep until a bell rings, a neighbour is lost, `wake` is called, or time is up."""
        now = time.monotonic()
        if now >= self._next_alive:
            self._next_alive = now + self._interval_s
            for peer in self._sockets:
                self._send(peer, _ALIVE)
                if now - self._heard[peer] > self._timeout_s:
                    self._lose(peer, f"nothing heard of it for {self._timeout_s:g} s")
        for descriptor, _ in self._epoll.poll(min(seconds, self._interval_s)):
            peer = self._peers.get(descriptor, -1)
            if peer < 0:
                self._wakened.recv(4096)
            else:
                self._hear(peer)

    def close(self) -> None:
        """Close all connections."""
        self._epoll.close()
        self._close_sockets()

    def _close_sockets(self) -> None:
        for connection in (*self._sockets.values(), self._wakened, self._waker):
            connection.close()

    def _hear(self, peer: int) -> None:
        try:
            sounds = self._sockets[peer].recv(4096)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(peer, error.strerror or str(error))
            return
        if not sounds:
            self._lose(peer, "it closed the connection")
            return
        self._heard[peer] = time.monotonic()
        ended = sounds.count(_ENDED)
        self.ringing[peer] += sounds.count(_RING) + ended
        self._working[peer] += sounds.count(_STARTED) - ended

    def _send(self, peer: int, sound: int) -> None:
        if peer in self.lost:
            return
        try:
            self._sockets[peer].send(bytes((sound,)))
        except OSError as error:
            # A full buffer means thousands of unanswered rings: the neighbour hangs.
            self._lose(peer, error.strerror or str(error))

    def _lose(self, peer: int, reason: str) -> None:
        if peer not in self.lost:
            self.lost[peer] = reason
            self._lost_at[peer] = time.monotonic()
            self._epoll.unregister(self._sockets[peer].fileno())


def _connect(rank: int, peer: int, address: Address, deadline: float) -> socket.socket:
    """A connection to the process at `address`, whichever of its hosts leads there."""
    failures = []
    for host in address.hosts:
        seconds = min(_CONNECT_S, max(0.001, deadline - time.monotonic()))
        try:
            connection = socket.create_connection((host, address.port), timeout=seconds)
            try:
                connection.sendall(_GREETING.pack(address.token, rank))
                if _read(connection, _TOKEN_BYTES) == address.token:
                    return connection
                raise OSError("another process answered")
            except OSError:
                connection.close()
                raise
        except OSError as error:
            failures.append(f"{host}: {error}")
    raise OSError(f"cannot reach stage {peer} by TCP ({'; '.join(failures)})")


def _read(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise OSError("the connection was closed")
        data += part
    return data


def _own_hosts() -> tuple[str, ...]:
    """This host's IPv4 addresses, most promising first; loopback, for one host, is last."""
    wanted = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    names = [name for _, name in socket.if_nameindex()]
    names.sort(key=lambda name: (name not in wanted, name == "lo"))
    hosts = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in names:
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                hosts.append(socket.inet_ntoa(answer[20:24]))
    return tuple(hosts)


_SIOCGIFADDR = 0x8915
"""Linux's request for the address of a network interface."""
