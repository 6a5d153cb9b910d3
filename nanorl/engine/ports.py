"""Listening sockets on this machine: bound by the launcher itself, so that nobody else can take the port."""

import contextlib
import socket
from pathlib import Path

from nanorl.errors import EngineError

HOST = "127.0.0.1"


def listen_locally(port: int = 0) -> socket.socket:
    """A listening socket on 127.0.0.1; port 0 takes a free one.

    Raises:
        EngineError: the port is taken, with its holder where that can be found out.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # A restart must not wait for the old connections' TIME_WAIT. A port somebody listens on is refused all the same.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        holder = port_holder(port)
        raise EngineError(
            f"Expected port {port} on {HOST} to be free: {error.strerror or error}"
            f"{f'; {holder} holds it' if holder else ''}. Choose another port, or 0 for any."
        ) from None
    return listener


def port_holder(port: int) -> str | None:
    """Who listens on a TCP port, like "process 4242 (python -m http.server)"; None where this user can't see it."""
    inodes = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    if not inodes:
        return None
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(str(fd.readlink()) in inodes for fd in (process / "fd").iterdir()):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
                return f"process {process.name} ({command[:120]})"
        except OSError:  # gone by now, or another user's
            continue
    return None


def _listening_inodes(port: int) -> list[str]:
    """Inodes of sockets in state LISTEN (0A) on a port, IPv4 and IPv6."""
    rows: list[list[str]] = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            rows += [line.split() for line in Path(table).read_text(encoding="ascii").splitlines()[1:]]
    return [row[9] for row in rows if row[3] == "0A" and int(row[1].rsplit(":", 1)[1], 16) == port]
