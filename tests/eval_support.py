"""A tiny language model with a byte tokenizer, and tiny data files of the built-in tasks' form."""

import json

import torch
from transformers import PreTrainedTokenizerFast

from mdn.models import MomentumDeltaNetConfig, MomentumDeltaNetForCausalLM
from mdn.training.tokenizer import END_OF_TEXT, byte_tokenizer

LAMBADA = ["the cat sat on the mat", "one two three four five", "a b", "she opened the old door and saw the garden"]
ARC = [
    {
        "question": f"Which of these is number {number}?",
        "choices": {"text": ["a stone", "two", f"the answer {number}", "no"], "label": ["A", "B", "C", "D"]},
        "answerKey": "ABCD"[number % 4],
    }
    for number in range(5)
]
PAGES = [
    {"page": " = Title = \n \n Some words , and more words .\n"},
    {"page": " = Other = \n \n A much longer page ." * 20},
]
COMPLETIONS = [
    {"text": "The capital of the green country is", "value": "e"},
    {"text": "x y z " * 40, "value": "never produced by this model"},
    {"text": "Short", "value": "a"},
]
QUESTIONS = [{"context": "A dog ran. Who ran?", "question": "Who ran?", "answers": ["dog", "a"]}]


def make_model(mixer: str = "momentum_deltanet", seed: int = 0) -> MomentumDeltaNetForCausalLM:
    torch.manual_seed(seed)
    config = MomentumDeltaNetConfig(
        vocab_size=257,
        hidden_size=32,
        num_hidden_layers=2,
        num_heads=2,
        head_dim=8,
        expand_v=1,
        hidden_ratio=2,
        initializer_range=0.2,  # so that an untrained model prefers some answers to others
        bos_token_id=256,
        eos_token_id=256,
        mixer=mixer,
    )
    return MomentumDeltaNetForCausalLM(config).eval()


def make_tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(),
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def write_lines(path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_data(folder) -> None:
    folder.mkdir(exist_ok=True)
    write_lines(folder / "lambada_openai.jsonl", [{"text": text} for text in LAMBADA])
    write_lines(folder / "arc_easy.jsonl", ARC)
    write_lines(folder / "wikitext.jsonl", PAGES)
    write_lines(folder / "squad_completion.jsonl", COMPLETIONS)
    write_lines(folder / "based_drop.jsonl", QUESTIONS)


def log_probabilities(model, ids: list[int]) -> torch.Tensor:
    """log p(next token) [len(ids), V], one sequence alone, no padding."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].double().log_softmax(-1)


def score(model, context: bytes, continuation: bytes) -> tuple[float, bool]:
    """Sum of log p of the continuation, and whether it is what greedy decoding would write."""
    ids = list(context + continuation)
    found = log_probabilities(model, ids)[len(context) - 1 : -1]
    target = torch.tensor(ids[len(context) :])
    return found.gather(1, target[:, None]).sum().item(), bool((found.argmax(-1) == target).all())
