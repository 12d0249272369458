"""A name server for the suite that knows no name and writes down which were asked for, on a bare python3."""

from __future__ import annotations

import socket
import sys
from pathlib import Path


def name_in(packet: bytes) -> str:
    labels: list[str] = []
    place = 12
    while place < len(packet) and packet[place]:
        size = packet[place]
        labels.append(packet[place + 1 : place + 1 + size].decode("ascii", "replace"))
        place += size + 1
    return ".".join(labels)


if __name__ == "__main__":
    listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    listener.bind(("127.0.0.1", 53))
    with Path(sys.argv[1]).open("a") as log:
        print("listening", file=log, flush=True)
        while True:
            packet, asker = listener.recvfrom(4096)
            print(name_in(packet).lower(), file=log, flush=True)
            listener.sendto(packet[:2] + b"\x81\x83" + packet[4:6] + bytes(6) + packet[12:], asker)  # no such name
