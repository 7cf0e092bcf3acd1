# SPDX-License-Identifier: MIT
"""A server of ggml's RPC that is lost at a chosen moment, always the same one."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator


class _Proxy:
    """Passes requests on to a server, until it has passed so many: then no connection is left."""

    def __init__(self, endpoint: str, n_requests: int) -> None:
        host, port = endpoint.split(":")
        self._server = (host, int(port))
        self._left = n_requests
        self._counting = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self._listener]
        self._threads: list[threading.Thread] = []
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def lose(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.lose()
        for thread in self._threads:
            thread.join()
        for each in self._sockets:
            each.close()

    def _start(self, run: Callable[..., None], *sockets: socket.socket) -> None:
        self._threads.append(threading.Thread(target=run, args=sockets))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while self._left >= 0:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                self._sockets += [client, server]
                self._start(self._ask, client, server)
                self._start(self._answer, client, server)

    def _ask(self, client: socket.socket, server: socket.socket) -> None:
        """A request is a command in 1 byte, a length in 8, and so many bytes."""
        requests = client.makefile("rb")
        with contextlib.suppress(OSError):
            while len(header := requests.read(9)) == 9:
                with self._counting:
                    self._left -= 1
                if self._left < 0:
                    self.lose()
                server.sendall(header + requests.read(int.from_bytes(header[1:], "little")))
            server.shutdown(socket.SHUT_RDWR)

    def _answer(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                client.sendall(data)
            client.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def lost_after(endpoint: str, n_requests: int) -> Iterator[str]:
    """The address of a server that is lost after so many requests, which that at `endpoint` answers."""
    proxy = _Proxy(endpoint, n_requests)
    try:
        yield proxy.endpoint
    finally:
        proxy.close()
