"""Stand for a process that `server.py` forks: `python client.py SOCKET SCRIPT [arguments]` runs SCRIPT there.

Imports next to nothing: starters run it once per rank.
"""

import json
import os
import socket
import sys

with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect(sys.argv[1])
    request = {"command": sys.argv[2:], "directory": os.getcwd(), "environ": dict(os.environ)}
    socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
    status = int(server.recv(16) or b"1")
sys.exit(status if status >= 0 else 128 - status)
