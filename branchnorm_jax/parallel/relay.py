"""A local address that forwards to JAX's coordinator in process 0.

JAX's client aborts its process as soon as its connection to process 0 breaks. The connection to the relay never breaks,
so that `monitor.py` can end the process with a message instead.
"""

import contextlib
import socket
import threading
import time

RETRY = 0.1
"""Seconds between two attempts to connect, while the coordinator starts."""


def start_relay(coordinator: tuple[str, int]) -> str:
    """Returns the address of a new relay to the `coordinator` (host, port), which runs in threads of this process."""
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_serve, args=(listener, coordinator), daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"


def _serve(listener: socket.socket, coordinator: tuple[str, int]) -> None:
    while True:
        local, _ = listener.accept()
        threading.Thread(target=_forward, args=(local, coordinator), daemon=True).start()


def _forward(local: socket.socket, coordinator: tuple[str, int]) -> None:
    remote = _connect(coordinator)
    threading.Thread(target=_copy, args=(remote, local), daemon=True).start()
    _copy(local, remote)
    with contextlib.suppress(OSError):
        remote.shutdown(socket.SHUT_RDWR)


def _connect(coordinator: tuple[str, int]) -> socket.socket:
    while True:
        with contextlib.suppress(OSError):
            connection = socket.create_connection(coordinator, timeout=10)
            connection.settimeout(None)
            return connection
        time.sleep(RETRY)


def _copy(source: socket.socket, sink: socket.socket) -> None:
    """Copies bytes until `source` is closed. Leaves `sink` open."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
