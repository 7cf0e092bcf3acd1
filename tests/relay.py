# SPDX-License-Identifier: MIT
"""A relay before a worker: its link may be slow to answer, or end after some bytes."""

import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_PIECE = 1 << 16


class Relay:
    """Passes bytes on between its clients and HOST:PORT, each piece after delay_s.

    most: bytes of the clients after which every connection ends and no new one is taken; None: never.
    """

    def __init__(self, to: str, delay_s: float = 0.0, most: int | None = None) -> None:
        host, _, port = to.rpartition(":")
        self._to, self._delay_s, self._most = (host, int(port)), delay_s, most
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.n_bytes = 0
        self._open: list[socket.socket] = [self._server]
        threading.Thread(target=self._accept, daemon=True).start()

    def end(self) -> None:
        """Ends all connections."""
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):  # it has ended
            while True:
                client, _ = self._server.accept()
                worker = socket.create_connection(self._to)
                for each in (client, worker):
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._open += [client, worker]
                threading.Thread(target=self._pass_on, args=(client, worker), daemon=True).start()

    def _pass_on(self, client: socket.socket, worker: socket.socket) -> None:
        other = {client: worker, worker: client}
        with suppress(OSError, ValueError):
            while True:
                for source in select.select([*other], [], [])[0]:
                    piece = source.recv(_PIECE)
                    self.n_bytes += len(piece) if source is client else 0
                    if not piece:
                        other[source].shutdown(socket.SHUT_WR)
                        return
                    if self._most is not None and self.n_bytes > self._most:
                        self.end()
                        return
                    time.sleep(self._delay_s)
                    other[source].sendall(piece)


@contextmanager
def relaying(to: str, delay_s: float = 0.0, most: int | None = None) -> Iterator[Relay]:
    """A relay until the block ends."""
    relay = Relay(to, delay_s, most)
    try:
        yield relay
    finally:
        relay.end()
