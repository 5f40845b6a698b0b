"""A headless Chromium, driven over the DevTools protocol: enough to load a page, press keys, measure and photograph.

with open_page(path) as page:
    page.evaluate("document.title");  page.press("ArrowRight");  page.screenshot(file)
"""

import asyncio
import base64
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import aiohttp

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-port=0"),
)
KEYS = {"ArrowRight": 39, "ArrowLeft": 37, "Home": 36, "End": 35, "Tab": 9, "Enter": 13}


def find_chromium() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if shutil.which(name):
            return name
    raise FileNotFoundError("no Chromium found: on Debian, apt-get install chromium")


class Page:
    """One tab. Events that came in are kept: ``events('Network.requestWillBeSent')``."""

    def __init__(self, loop, socket):
        self.loop, self.socket, self.number, self.seen = loop, socket, 0, []

    def call(self, method, **parameters):
        return self.loop.run_until_complete(self._call(method, parameters))

    async def _call(self, method, parameters):
        self.number += 1
        await self.socket.send_json({"id": self.number, "method": method, "params": parameters})
        while True:
            message = json.loads((await asyncio.wait_for(self.socket.receive(), 60)).data)
            if message.get("id") == self.number:
                assert "error" not in message, message
                return message["result"]
            self.seen.append(message)

    def events(self, method):
        self.evaluate("0")  # a round trip, so that what is under way has arrived
        return [message["params"] for message in self.seen if message.get("method") == method]

    def evaluate(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def press(self, key, times=1):
        for _ in range(times):
            for kind in ("rawKeyDown", "keyUp"):
                code = KEYS[key]
                self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def resize(self, width, height, mobile=False):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    def colours(self, scheme):
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path):
        data = self.call("Page.captureScreenshot", format="png")["data"]
        Path(path).write_bytes(base64.b64decode(data))


@contextmanager
def open_page(path):
    """The page of a local file, loaded, with all events since before its first request."""
    loop = asyncio.new_event_loop()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [find_chromium(), *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        session = None
        try:
            address = _address_of_tab(Path(profile))
            session = loop.run_until_complete(_session())
            socket = loop.run_until_complete(session.ws_connect(address, max_msg_size=0))
            page = Page(loop, socket)
            for domain in ("Page", "Runtime", "Network", "Log"):
                page.call(f"{domain}.enable")
            page.call("Page.navigate", url=Path(path).resolve().as_uri())
            _wait(lambda: page.evaluate("document.readyState") == "complete")
            yield page
        finally:
            if session is not None:
                loop.run_until_complete(session.close())
            process.terminate()
            process.wait(20)
            loop.close()


async def _session():
    return aiohttp.ClientSession()


def _address_of_tab(profile):
    port_file = profile / "DevToolsActivePort"
    _wait(lambda: port_file.is_file() and port_file.read_text().strip())
    port = port_file.read_text().split()[0]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=30) as answer:
        tabs = json.load(answer)
    return next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")


def _wait(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the browser did not get ready")
        time.sleep(0.1)
