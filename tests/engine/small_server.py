"""A command for the launcher's own tests: answers /model_info on an inherited socket, or misbehaves as asked.

The launcher is generic over commands; what it must survive (a command that ignores SIGTERM, that dies while loading,
that leaves grandchildren) is not something a well-behaved engine does.
"""

import http.server
import signal
import socket
import subprocess
import sys
import time


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b'{"model_path": "small", "weight_version": "0"}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    behaviour, fd = sys.argv[1], int(sys.argv[2])
    if behaviour == "die":
        print("RuntimeError: CUDA out of memory. Tried to allocate 2 GiB", flush=True)
        sys.exit(3)
    if behaviour == "never-answer":
        time.sleep(600)
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour == "family":  # a grandchild in a session of its own, which ignores SIGTERM
        code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('it is up', flush=True); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        print(f"grandchild {child.pid}", flush=True)
    server = http.server.HTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
    server.socket = socket.socket(fileno=fd)
    server.serve_forever()
