"""A real headless browser, driven over the pipe of its DevTools protocol; nothing to install."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
import zlib

import numpy as np

NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-extensions", "--hide-scrollbars", "--remote-debugging-pipe"),
)


def find_browser():
    """The browser's path, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page at a time. `requests` and `complaints` are those of the page since `open`."""

    def __init__(self, seconds=60):
        self.seconds = seconds
        self.profile = tempfile.mkdtemp(prefix="fewbit-browser-")
        (theirs_in, self.to), (self.come, theirs_out) = os.pipe(), os.pipe()
        # The protocol speaks on descriptors 3 and 4; higher copies cannot be in each other's way.
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (theirs_in, theirs_out)]
        command = f'exec "$0" "$@" 3<&{ends[0]} 4>&{ends[1]}'
        arguments = [find_browser(), *_FLAGS, f"--user-data-dir={self.profile}", "about:blank"]
        self.process = subprocess.Popen(
            ["bash", "-c", command, *arguments],
            pass_fds=ends,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (*ends, theirs_in, theirs_out):
            os.close(fd)
        self.number, self.rest, self.events, self.session = 0, b"", [], None
        found = self.call("Target.getTargets")["targetInfos"]
        target = next(t["targetId"] for t in found if t["type"] == "page")
        attach = dict(targetId=target, flatten=True)
        self.session = self.call("Target.attachToTarget", **attach)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        for fd in (self.to, self.come):
            os.close(fd)
        shutil.rmtree(self.profile, ignore_errors=True)

    def call(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.events.append(answer)

    def receive(self):
        end = time.monotonic() + self.seconds
        while b"\0" not in self.rest:
            ready = select.select([self.come], [], [], max(end - time.monotonic(), 0))[0]
            assert ready, f"the browser said nothing for {self.seconds} s"
            self.rest += os.read(self.come, 1 << 20)
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def open(self, url, width=1200, height=900, dark=False):
        """Load a page of this size, to the end."""
        self.events.clear()
        size = dict(width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        self.call("Emulation.setDeviceMetricsOverride", **size)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[theme])
        self.go("about:blank")  # to its end: its news would be taken for those of the page
        self.go(url)

    def go(self, url):
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self.receive())

    def run(self, script):
        """The value of a JavaScript expression on the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    @property
    def requests(self):
        """Addresses that the page asked for, itself included."""
        self.run("1")  # what happened before this has been told by now
        return [
            e["params"]["request"]["url"]
            for e in self.events
            if e.get("method") == "Network.requestWillBeSent"
        ]

    @property
    def complaints(self):
        """What came to the console: errors, warnings, exceptions, violations of the policy."""
        self.run("1")
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [e for e in self.events if e.get("method") in kinds]

    def picture(self):
        """What is seen, as an array of (height, width, 3) bytes."""
        # A page that has loaded may not be the one on the screen yet: two frames later it is.
        frames = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        self.call("Runtime.evaluate", expression=frames, awaitPromise=True)
        return read_png(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


def read_png(data):
    """A PNG of 8-bit RGB or RGBA, as browsers write them, without its alpha."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, parts, header = 8, [], None
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        header = body if kind == b"IHDR" else header
        parts += [body] if kind == b"IDAT" else []
        at += 12 + size
    width, height = (int.from_bytes(header[i : i + 4], "big") for i in (0, 4))
    depth, colour = header[8], header[9]
    assert depth == 8 and colour in (2, 6)
    n = 3 if colour == 2 else 4
    data, stride = zlib.decompress(b"".join(parts)), n * width
    above, rows = bytes(stride), []
    for start in range(0, len(data), stride + 1):
        above = _unfiltered(data[start], bytearray(data[start + 1 : start + 1 + stride]), above, n)
        rows.append(above)
    return np.frombuffer(b"".join(rows), np.uint8).reshape(height, width, n)[..., :3]


def _unfiltered(kind, line, above, n):
    for i in range(len(line) if kind else 0):
        left = line[i - n] if i >= n else 0
        up, corner = above[i], above[i - n] if i >= n else 0
        if kind == 4:
            a, b, c = abs(up - corner), abs(left - corner), abs(left + up - 2 * corner)
            guess = left if a <= b and a <= c else up if b <= c else corner
        else:
            guess = (left, up, (left + up) // 2)[kind - 1]
        line[i] = (line[i] + guess) & 255
    return bytes(line)
