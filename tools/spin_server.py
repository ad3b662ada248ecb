# SPDX-License-Identifier: Apache-2.0
"""Starts `spin serve` on a free loopback port for the end-to-end scripts (standard library only)."""
import http.client
import json
import re
import signal
import subprocess
import threading
import time


class SpinServer:
    """with SpinServer(["--model", M]) as server: server.post("/v1/completions", {...})"""

    def __init__(self, arguments, binary="build/cpu-release/spin", start_seconds=120):
        self.command = [binary, "serve", "--host", "127.0.0.1", "--port", "0", *arguments]
        self.start_seconds = start_seconds
        self.port = None
        self.lines = []

    def __enter__(self):
        self.process = subprocess.Popen(self.command, stderr=subprocess.PIPE, text=True)
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        deadline = time.monotonic() + self.start_seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError("spin serve ended:\n" + "".join(self.lines))
            if self.port and self._healthy():
                return self
            time.sleep(0.05)
        self.process.kill()
        raise RuntimeError("spin serve did not get ready:\n" + "".join(self.lines))

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line)
            found = re.search(r"listening on http://127\.0\.0\.1:(\d+)", line)
            if found:
                self.port = int(found.group(1))

    def _healthy(self):
        try:
            return self.request("GET", "/health")[0] == 200
        except OSError:
            return False

    def request(self, method, path, body=None, timeout=1200):
        """(status, text) of one request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode("utf-8")
        finally:
            connection.close()

    def post(self, path, body):
        """Parsed answer of a request that has to succeed."""
        status, text = self.request("POST", path, body)
        if status != 200:
            raise RuntimeError(f"{path}: {status}: {text[:300]}")
        return json.loads(text)
