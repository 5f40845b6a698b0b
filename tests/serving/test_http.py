"""The server as clients see it: the `openai` package against `mdn serve` on the loopback interface."""

from __future__ import annotations

import json
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import openai
import pytest

from mdn.common.loading import load
from mdn.training.run import train
from served_http import server
from training_support import tiny_recipe

LIMIT = 256  # tokens of a prompt and its answer
PROMPTS = ("alpha beta", "gate ", "k", "momentum state token " * 4)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder with a trained run."""
    root = tmp_path_factory.mktemp("served")
    train(tiny_recipe(root, training={"steps": 30}))
    return root / "run"


@pytest.fixture(scope="module")
def expected(run):
    """Greedy continuations of a few prompts, by transformers."""
    model, tokenizer = load(run, "float32", "cpu")
    found = {}
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
        output = model.generate(ids, max_new_tokens=16, do_sample=False, eos_token_id=None)
        found[prompt] = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    return found


@pytest.fixture(scope="module")
def served(run):
    flags = ["--max-model-len", str(LIMIT), "--vllm=--enforce-eager --max-num-seqs 32"]
    with server([str(run), *flags], run.parent) as started:
        yield started


def test_a_completion_is_the_text_that_transformers_generates(served, expected):
    for prompt, text in expected.items():
        assert served.complete(prompt) == text


def test_a_streamed_answer_comes_in_pieces_of_the_same_text(served, expected):
    for prompt, text in expected.items():
        pieces = served.client().completions.create(
            model="run", prompt=prompt, max_tokens=16, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        received = [piece.choices[0].text for piece in pieces]
        assert len(received) > 4
        assert "".join(received) == text


def test_several_answers_and_logprobs(served):
    reply = served.client().completions.create(
        model="run", prompt="alpha", n=3, max_tokens=8, temperature=1.0, seed=3, logprobs=2
    )
    assert len(reply.choices) == 3
    for choice in reply.choices:
        assert all(logprob <= 0 for logprob in choice.logprobs.token_logprobs)


def test_a_client_that_disconnects_leaves_no_request_behind(served, expected):
    before = served.metric("generation_tokens_total")
    stream = served.client().completions.create(
        model="run", prompt="alpha", max_tokens=LIMIT - 20, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    served.wait_until_idle()
    assert served.metric("generation_tokens_total") - before < LIMIT - 20
    assert served.complete("gate ") == expected["gate "]


def test_what_cannot_be_answered_is_refused_and_the_server_goes_on(served, expected):
    with pytest.raises(openai.BadRequestError, match="maximum"):
        served.complete("alpha " * LIMIT)
    with pytest.raises(openai.BadRequestError):
        served.complete("alpha", max_tokens=-1)
    with pytest.raises(openai.NotFoundError):
        served.client().completions.create(model="another", prompt="alpha")
    request = urllib.request.Request(
        f"{served.address}/v1/completions", b'{"model": "run", "prompt": ', {"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=30)
    assert 400 <= refused.value.code < 500
    assert "error" in json.loads(refused.value.read())
    assert served.complete("gate ") == expected["gate "]


def test_32_clients_for_a_minute_all_get_their_answers(served, expected):
    clients, seconds = 32, 60
    failures, answers, sizes = [], [], []
    end = time.monotonic() + seconds

    def client(number: int) -> None:
        prompts = list(expected)
        while time.monotonic() < end:
            prompt = prompts[(number + len(answers)) % len(prompts)]
            try:
                if served.complete(prompt) != expected[prompt]:
                    failures.append(f"another text for {prompt!r}")
                answers.append(number)
            except Exception as error:
                failures.append(repr(error))

    served.complete("alpha beta")
    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    while time.monotonic() < end:
        time.sleep(seconds / 12)
        sizes.append(served.memory())
    for thread in threads:
        thread.join()
    assert failures == []
    assert set(answers) == set(range(clients))
    served.wait_until_idle()
    warm = sizes[len(sizes) // 3]
    assert max(sizes[len(sizes) // 3 :]) < 1.05 * warm + 20 * 2**20


def test_the_server_of_transformers_gives_the_same_text(run, expected):
    """`transformers serve`, which does not import the package: the directory's own code does."""
    command = [str(Path(sys.executable).parent / "transformers"), "serve"]
    directory = str(run / "model")
    with server([directory, "--trust-remote-code"], run.parent, command) as started:
        for prompt, text in expected.items():
            settings = {"model": directory, "prompt": prompt, "max_tokens": 8, "temperature": 0}
            answer = started.client().completions.create(**settings).choices[0].text
            streamed = started.client().completions.create(**settings, stream=True)
            assert answer
            assert text.startswith(answer)
            assert "".join(piece.choices[0].text for piece in streamed) == answer
