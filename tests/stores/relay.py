"""A TCP relay that can be told to stop in the middle of a transfer."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Self

PATIENCE = 120
"""Seconds. Nothing here takes so long, even on a very slow machine."""


class Relay:
    """Passes on what arrives at a port of its own, byte by byte, to the port of a server."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.target: int | None = None
        """The server's port; connections wait for it."""
        self.allowed: int | None = None
        """How many more bytes may pass in one direction; None for all."""
        self.of_server = True
        """That direction: from the server, or to it."""
        self.received = 0
        """How many bytes the server has sent."""
        self.connections: list[socket.socket] = []
        self.threads: list[threading.Thread] = []
        self.listener: socket.socket | None = None
        self.port = 0
        self.wait()
        self.url = f"http://127.0.0.1:{self.port}"

    @classmethod
    @contextlib.contextmanager
    def running(cls) -> Iterator[Self]:
        relay = cls()
        try:
            yield relay
        finally:
            relay.refuse()
            relay.release()
            for thread in relay.threads:
                thread.join(PATIENCE)

    def wait(self) -> None:
        """Accepts connections, always at the same port, which wait until they lead to a server."""
        listener = socket.socket()
        # Connections of before may still be in TIME_WAIT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(128)
        self.port = listener.getsockname()[1]
        self.listener = listener
        self.start(self.accept, listener)

    def lead_to(self, port: int) -> None:
        with self.changed:
            self.target = port
            self.changed.notify_all()

    def refuse(self) -> None:
        """Ends all connections, and refuses new ones, as a host does whose server has ended."""
        assert self.listener
        # close() alone does not wake the thread in accept().
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        with self.changed:
            self.target = None
            connections, self.connections = self.connections, []
            self.changed.notify_all()
        for connection in connections:
            end(connection)

    def stop_after(self, nbytes: int, of_server: bool = True) -> None:
        """Lets so many more bytes of the server pass, or of its clients, and no more."""
        with self.changed:
            self.allowed, self.of_server = nbytes, of_server

    def wait_until_stopped(self) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.allowed == 0, PATIENCE), "it never stops"

    def release(self) -> None:
        with self.changed:
            self.allowed = None
            self.changed.notify_all()

    def start(self, run: object, *words: object) -> None:
        assert callable(run)
        thread = threading.Thread(target=run, args=words, daemon=True)
        self.threads.append(thread)
        thread.start()

    def accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                with self.changed:
                    self.connections.append(client)
                self.start(self.connect, client)

    def connect(self, client: socket.socket) -> None:
        with self.changed:
            # It may have been ended while it waited.
            self.changed.wait_for(lambda: self.target or client not in self.connections)
            target = self.target
        try:
            server = socket.create_connection(("127.0.0.1", target or 0), PATIENCE)
        except OSError:
            end(client)
            return
        server.settimeout(None)
        with self.changed:
            self.connections.append(server)
        self.start(self.copy, client, server, False)
        self.copy(server, client, True)

    def copy(self, source: socket.socket, sink: socket.socket, of_server: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if of_server:
                    with self.changed:
                        self.received += len(data)
                for part in self.let(data, of_server):
                    sink.sendall(part)
        end(source)
        end(sink)

    def let(self, data: bytes, of_server: bool) -> Iterator[bytes]:
        """What may pass of some bytes, when it may."""
        while data:
            with self.changed:
                self.changed.wait_for(lambda: self.allowed != 0 or self.of_server != of_server)
                count = len(data)
                if self.allowed is not None and self.of_server == of_server:
                    count = min(count, self.allowed)
                    self.allowed -= count
                    self.changed.notify_all()
            yield data[:count]
            data = data[count:]


def end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
