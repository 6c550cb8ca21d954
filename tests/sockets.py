"""Where the processes of a program listen, as Linux has it in /proc."""

from __future__ import annotations

import ipaddress
import os
import struct
from pathlib import Path

LISTENS = "0A"


def descendants(of: int | None = None) -> dict[int, str]:
    """The command lines of the processes that a process, this one by default, started, and of those that they started."""
    parents, names = {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            names[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
            parents[int(entry.name)] = int(fields[1]) if fields[0] != "Z" else -1
        except (FileNotFoundError, ProcessLookupError):
            continue
    found, level = {}, {os.getpid() if of is None else of}
    while level:
        level = {pid for pid, parent in parents.items() if parent in level}
        found |= {pid: names[pid] for pid in level}
    return found


def listening(pids) -> set[str]:
    """The addresses at which processes accept TCP connections; of an IPv4 address mapped to IPv6 that of IPv4."""
    sockets = {link[len("socket:[") : -1] for pid in pids for link in _links(pid) if link.startswith("socket:[")}
    rows = [line.split() for table in ("tcp", "tcp6") for line in Path("/proc/net", table).read_text().splitlines()[1:]]
    return {_address(row[1]) for row in rows if row[3] == LISTENS and row[9] in sockets}


def _links(pid):
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            yield os.readlink(f"/proc/{pid}/fd/{name}")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return


def _address(written: str) -> str:
    """An address as it is written in /proc/net: words of 32 bits, each in the machine's order of bytes."""
    digits = written.partition(":")[0]
    words = struct.pack(f"={len(digits) // 8}I", *(int(digits[k : k + 8], 16) for k in range(0, len(digits), 8)))
    address = ipaddress.ip_address(words)
    return str(getattr(address, "ipv4_mapped", None) or address)
