"""A server that tests start with `mdn serve` and talk to over the loopback interface."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import openai
import psutil


@dataclass
class Server:
    process: subprocess.Popen
    address: str
    model: str

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.address}/v1", api_key="none", max_retries=0, timeout=120)

    def complete(self, prompt: str, **settings) -> str:
        settings = {"max_tokens": 16, "temperature": 0, "extra_body": {"ignore_eos": True}, **settings}
        return self.client().completions.create(model=self.model, prompt=prompt, **settings).choices[0].text

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.address}/metrics", timeout=30) as reply:
            found = re.findall(rf"^vllm:{name}{{[^}}]*}} (\S+)$", reply.read().decode(), re.MULTILINE)
        assert found, name
        return sum(map(float, found))

    def wait_until_idle(self, seconds: float = 60) -> None:
        """Until no request is left, and no page is in use."""
        deadline = time.monotonic() + seconds
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            while self.metric(name) > 0:
                assert time.monotonic() < deadline, f"{name} is still {self.metric(name)}"
                time.sleep(0.2)

    def memory(self) -> int:
        """Resident bytes of the server's processes."""
        parent = psutil.Process(self.process.pid)
        return sum(process.memory_info().rss for process in [parent, *parent.children(recursive=True)])


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


AS_USERS_DO = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}  # the engine and its worker are processes of their own
MDN_SERVE = (sys.executable, "-m", "mdn", "serve")


@contextmanager
def server(
    arguments: list[str], folder: Path, command: Sequence[str] = MDN_SERVE, **environment: str
) -> Iterator[Server]:
    """`mdn serve ARGUMENTS` in ``folder``, on a port of its own, until the end of the block."""
    port, log = free_port(), folder / "server.log"
    command = [*command, arguments[0], "--port", str(port), *arguments[1:]]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=folder, env=os.environ | AS_USERS_DO | environment
        )
        try:
            found = Server(process, f"http://127.0.0.1:{port}", Path(arguments[0]).name)
            _wait_until_ready(found, log)
            yield found
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_until_ready(server: Server, log: Path) -> None:
    for _ in range(1800):  # a busy machine needs minutes
        assert server.process.poll() is None, log.read_text()[-3000:]
        try:
            urllib.request.urlopen(f"{server.address}/health", timeout=5)
            return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-3000:])
