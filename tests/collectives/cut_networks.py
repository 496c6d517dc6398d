"""Two network namespaces with a cable between them, which a test can cut."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence

import pytest
from workers import is_root

NAMESPACES = ("collectives-test-a", "collectives-test-b")
HOSTS = ("10.231.77.1", "10.231.77.2")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)


@contextlib.contextmanager
def two_hosts() -> Iterator[Sequence[str]]:
    """Provide the names of two network namespaces with a cable between them."""
    if not (is_root() and shutil.which("ip")):
        pytest.skip("network namespaces need root and the program ip")
    names = [f"{name}-{os.getpid()}" for name in NAMESPACES]
    cable = [f"col{os.getpid() % 10**8:x}{end}" for end in "ab"]
    with contextlib.ExitStack() as stack:
        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(ip, "netns", "delete", name)
            ip("link", "add", cable[0], "netns", names[0], "type", "veth", "peer", "name", cable[1], "netns", names[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        for name, end, host in zip(names, cable, HOSTS, strict=True):
            ip("-n", name, "address", "add", f"{host}/24", "dev", end)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", end, "up")
        yield names


def unplug(namespace: str) -> None:
    """Cut the cable; nothing passes from now on, and no side is told."""
    cable = f"col{os.getpid() % 10**8:x}a"
    ip("-n", namespace, "link", "set", cable, "down")


def shrink_send_buffers(namespace: str) -> None:
    """Shrink the send buffers so that gRPC is always in the middle of a write."""
    order = "echo 4096 8192 8192 > /proc/sys/net/ipv4/tcp_wmem"
    ip("netns", "exec", namespace, "sh", "-c", order)
