"""The server as clients see it: the `openai` package against `mdn serve` on the loopback interface."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field

import openai
import psutil
import pytest

from mdn.common.loading import load
from mdn.training.run import train
from training_support import tiny_recipe

LIMIT = 256  # tokens of a prompt and its answer


@dataclass
class Server:
    process: subprocess.Popen
    address: str
    expected: dict[str, str] = field(default_factory=dict)
    """greedy continuations of a few prompts, by transformers"""

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.address}/v1", api_key="none", max_retries=0, timeout=120)

    def complete(self, prompt: str, **settings) -> str:
        settings = {"max_tokens": 16, "temperature": 0, "extra_body": {"ignore_eos": True}, **settings}
        return self.client().completions.create(model="run", prompt=prompt, **settings).choices[0].text

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.address}/metrics", timeout=30) as reply:
            found = re.findall(rf"^vllm:{name}{{[^}}]*}} (\S+)$", reply.read().decode(), re.MULTILINE)
        assert found, name
        return sum(map(float, found))

    def wait_until_idle(self, seconds: float = 60) -> None:
        """Until no request is left, and no page is in use."""
        deadline = time.monotonic() + seconds
        while self.metric("num_requests_running") + self.metric("num_requests_waiting") > 0:
            assert time.monotonic() < deadline, "requests are still running"
            time.sleep(0.2)
        while self.metric("kv_cache_usage_perc") > 0:
            assert time.monotonic() < deadline, "pages are still in use"
            time.sleep(0.2)

    def memory(self) -> int:
        """Resident bytes of the server's processes."""
        parent = psutil.Process(self.process.pid)
        return sum(process.memory_info().rss for process in [parent, *parent.children(recursive=True)])


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("served")
    train(tiny_recipe(root, training={"steps": 30}))
    model, tokenizer = load(root / "run", "float32", "cpu")
    expected = {}
    for prompt in ("alpha beta", "gate ", "k", "momentum state token " * 4):
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
        output = model.generate(ids, max_new_tokens=16, do_sample=False, eos_token_id=None)
        expected[prompt] = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = ["--port", str(port), "--max-model-len", str(LIMIT), "--", "--enforce-eager", "--max-num-seqs", "32"]
    log = (root / "server.log").open("w")
    process = subprocess.Popen(
        [sys.executable, "-m", "mdn", "serve", str(root / "run"), *flags], stdout=log, stderr=subprocess.STDOUT
    )
    found = Server(process, f"http://127.0.0.1:{port}", expected)
    try:
        wait_until_ready(found, root / "server.log")
        yield found
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def wait_until_ready(server: Server, log) -> None:
    for _ in range(600):
        assert server.process.poll() is None, log.read_text()[-3000:]
        try:
            urllib.request.urlopen(f"{server.address}/health", timeout=5)
            return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-3000:])


def test_a_completion_is_the_text_that_transformers_generates(server):
    for prompt, text in server.expected.items():
        assert server.complete(prompt) == text


def test_a_streamed_answer_comes_in_pieces_of_the_same_text(server):
    for prompt, text in server.expected.items():
        pieces = server.client().completions.create(
            model="run", prompt=prompt, max_tokens=16, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        received = [piece.choices[0].text for piece in pieces]
        assert len(received) > 4
        assert "".join(received) == text


def test_several_answers_and_logprobs(server):
    reply = server.client().completions.create(
        model="run", prompt="alpha", n=3, max_tokens=8, temperature=1.0, seed=3, logprobs=2
    )
    assert len(reply.choices) == 3
    for choice in reply.choices:
        assert all(logprob <= 0 for logprob in choice.logprobs.token_logprobs)


def test_a_client_that_disconnects_leaves_no_request_behind(server):
    before = server.metric("generation_tokens_total")
    stream = server.client().completions.create(
        model="run", prompt="alpha", max_tokens=LIMIT - 20, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    server.wait_until_idle()
    assert server.metric("generation_tokens_total") - before < LIMIT - 20
    assert server.complete("gate ") == server.expected["gate "]


def test_what_cannot_be_answered_is_refused_and_the_server_goes_on(server):
    with pytest.raises(openai.BadRequestError, match="maximum"):
        server.complete("alpha " * LIMIT)
    with pytest.raises(openai.BadRequestError):
        server.complete("alpha", max_tokens=-1)
    with pytest.raises(openai.NotFoundError):
        server.client().completions.create(model="another", prompt="alpha")
    request = urllib.request.Request(
        f"{server.address}/v1/completions", b'{"model": "run", "prompt": ', {"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=30)
    assert 400 <= refused.value.code < 500
    assert "error" in json.loads(refused.value.read())
    assert server.complete("gate ") == server.expected["gate "]


@pytest.mark.parametrize(
    ("clients", "seconds"), [(8, 12), pytest.param(32, 60, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_many_clients_at_once_all_get_their_answers(clients, seconds, server):
    failures, answers, sizes = [], [], []
    end = time.monotonic() + seconds

    def client(number: int) -> None:
        prompts = list(server.expected)
        while time.monotonic() < end:
            prompt = prompts[(number + len(answers)) % len(prompts)]
            try:
                if server.complete(prompt) != server.expected[prompt]:
                    failures.append(f"another text for {prompt!r}")
                answers.append(number)
            except Exception as error:
                failures.append(repr(error))

    server.complete("alpha beta")
    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    while time.monotonic() < end:
        time.sleep(seconds / 12)
        sizes.append(server.memory())
    for thread in threads:
        thread.join()
    assert failures == []
    assert set(answers) == set(range(clients))
    server.wait_until_idle()
    warm = sizes[len(sizes) // 3]
    assert max(sizes[len(sizes) // 3 :]) < 1.05 * warm + 20 * 2**20
