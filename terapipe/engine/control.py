"""The line between the launcher and its ranks: jobs one way, progress and results the other.

One loopback connection a rank, one JSON object a line. It is also the ranks' lifeline: it closes
when the launching process ends, however it ends, and a rank whose line closed exits at once.
"""

import json
import os
import queue
import secrets
import selectors
import socket
import threading
from collections.abc import Iterator
from typing import Any

LOOPBACK = "127.0.0.1"
ENVIRONMENT = "TERAPIPE_CONTROL"  # "host:port:token:rank"
LAUNCHER_GONE = 17  # exit code of a rank whose launcher is gone


class Switchboard:
    """The launcher's end of all lines."""

    def __init__(self, n_ranks: int) -> None:
        self.n_ranks, self.token = n_ranks, secrets.token_hex(16)
        self.listener = socket.create_server((LOOPBACK, 0), backlog=n_ranks)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.lines: dict[int, socket.socket] = {}
        self.buffers: dict[socket.socket, bytes] = {}

    def environment(self, rank: int) -> dict[str, str]:
        """What a rank needs in order to call."""
        return {ENVIRONMENT: f"{LOOPBACK}:{self.listener.getsockname()[1]}:{self.token}:{rank}"}

    def send(self, message: dict[str, Any]) -> None:
        """Send one object to every rank; ranks that are gone are noticed by their process."""
        for line in self.lines.values():
            try:
                line.sendall(json.dumps(message).encode() + b"\n")
            except OSError:
                continue

    def receive(self, timeout_s: float) -> Iterator[tuple[int, dict[str, Any]]]:
        """What ranks say within the timeout, and all that has arrived by then: (rank, object)."""
        while ready := self.selector.select(timeout_s):
            for key, _ in ready:
                if key.fileobj is self.listener:
                    line, _ = self.listener.accept()
                    self.selector.register(line, selectors.EVENT_READ)
                    self.buffers[line] = b""
                    continue
                assert isinstance(key.fileobj, socket.socket)
                yield from self._read(key.fileobj)
            timeout_s = 0

    def _read(self, line: socket.socket) -> Iterator[tuple[int, dict[str, Any]]]:
        try:
            data = line.recv(1 << 20)
        except OSError:
            data = b""
        if not data:
            self.selector.unregister(line)
            return
        *complete, self.buffers[line] = (self.buffers[line] + data).split(b"\n")
        for text in complete:
            rank = next((rank for rank, known in self.lines.items() if known is line), None)
            if rank is None:
                rank = self._admit(line, text)
            if rank is None:
                return
            yield rank, json.loads(text)

    def _admit(self, line: socket.socket, text: bytes) -> int | None:
        """The rank that calls; hang up on a caller who does not know the token."""
        try:
            hello = json.loads(text)
            if secrets.compare_digest(hello["token"], self.token):
                self.lines[int(hello["rank"])] = line
                return int(hello["rank"])
        except (ValueError, TypeError, KeyError):
            pass
        self.selector.unregister(line)
        del self.buffers[line]
        line.close()
        return None

    def close(self) -> None:
        """Hang up: every rank that is left exits."""
        for line in self.buffers:
            line.close()
        self.listener.close()
        self.selector.close()


class Telephone:
    """A rank's end of its line."""

    def __init__(self, address: str) -> None:
        host, port, token, rank = address.rsplit(":", 3)
        self.line = socket.create_connection((host, int(port)))
        self.jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.say({"token": token, "rank": int(rank)})
        threading.Thread(target=self._listen, daemon=True, name="terapipe-lifeline").start()

    def say(self, message: dict[str, Any]) -> None:
        """Send one object to the launcher."""
        self.line.sendall(json.dumps(message).encode() + b"\n")

    def next_job(self) -> dict[str, Any]:
        """Wait for the next object from the launcher."""
        return self.jobs.get()

    def _listen(self) -> None:
        try:
            for text in self.line.makefile("rb"):
                self.jobs.put(json.loads(text))
        except OSError:
            pass
        os._exit(LAUNCHER_GONE)
