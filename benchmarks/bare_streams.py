"""A worker of `all_reduce.py --backends grpc`: a pair of gRPC byte streams, one each way, and nothing else.

usage: bare_streams.py SOCKET RANK ADDRESS ADDRESS     (the addresses of both ranks)

The reference for our ring. The pair moves the same bytes both ways at once, in messages of the same size. It copies
each message once out of the program's memory and once into it. It adds, checks and watches nothing.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import control
import grpc

MESSAGE_BYTES = 1 << 20
METHOD = "/benchmark/stream"
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
LIMIT_S = 60.0


def main() -> None:
    path, rank, *addresses = sys.argv[1:]
    streams = BareStreams(addresses[int(rank)], addresses[1 - int(rank)])
    control.serve(path, "bare", int(rank), {"prepare": streams.prepare, "turn": streams.turn})
    streams.close()


class BareStreams(grpc.GenericRpcHandler):  # type: ignore[misc,unused-ignore]
    """A stream to the other process, and a stream from it.

    Args:
        own_address: Address on which this process listens.
        other_address: Address on which the other process listens.
    """

    def __init__(self, own_address: str, other_address: str) -> None:
        self._messages = 1
        self._outgoing = memoryview(bytearray(MESSAGE_BYTES))
        self._incoming = bytearray(MESSAGE_BYTES)
        self._orders: SimpleQueue[bool] = SimpleQueue()
        self._has_received = threading.Semaphore(0)
        self._server = grpc.server(ThreadPoolExecutor(1), handlers=[self], options=UNLIMITED)
        self._server.add_insecure_port(own_address)
        self._server.start()
        self._channel = grpc.insecure_channel(other_address, options=UNLIMITED)
        grpc.channel_ready_future(self._channel).result(LIMIT_S)
        self._call = self._channel.stream_unary(METHOD).future(self._send())

    def service(self, handler_call_details: Any) -> Any:
        """Return the handler of an incoming stream; gRPC calls this for each."""
        return grpc.stream_unary_rpc_method_handler(self._receive)

    def prepare(self, way: str, nbytes: int, replicas: int) -> dict[str, bool]:
        """Set the bytes of an exchange, each way; call it in both processes before either of them begins a turn."""
        self._messages = max(1, nbytes // MESSAGE_BYTES)
        size = nbytes // self._messages
        self._outgoing, self._incoming = memoryview(bytearray(size)), bytearray(size)
        return {}

    def turn(self, way: str, repeats: int) -> float:
        """Return the seconds per exchange, of `repeats` in a row; one more before them synchronises the processes."""
        self._exchange()
        began = time.perf_counter()
        for _ in range(repeats):
            self._exchange()
        return (time.perf_counter() - began) / repeats

    def close(self) -> None:
        """End this process's stream, and wait for the end of the other stream."""
        self._orders.put(False)
        self._call.result(LIMIT_S)
        self._channel.close()
        self._server.stop(LIMIT_S).wait(LIMIT_S)

    def _exchange(self) -> None:
        self._orders.put(True)
        if not self._has_received.acquire(timeout=LIMIT_S):
            raise SystemExit(f"the other process has not sent its bytes within {LIMIT_S:g} s")

    def _send(self) -> Iterator[bytes]:
        while self._orders.get():
            for _ in range(self._messages):
                yield bytes(self._outgoing)

    def _receive(self, messages: Iterator[bytes], _context: Any) -> bytes:
        received = 0
        for message in messages:
            self._incoming[:] = message
            received += 1
            if received == self._messages:
                received = 0
                self._has_received.release()
        return b""


if __name__ == "__main__":
    main()
