"""The prefix-linear-attention protocol for retrieval tasks: what is asked and how an answer is scored.

Two forms of documents: a text that breaks off before its answer (fda, swde, squad_completion: `text`, `value`), and a
context with a question (NQ, TriviaQA, DROP: `context`, `question`, `answers`). The model continues for at most 48
tokens or to the end of the line; it scores 1 if any gold answer occurs in what it wrote, whatever the case.
The functions are named in `tasks/*.yaml`.
"""

from __future__ import annotations

import re
from typing import Any

Document = dict[str, Any]

# Marks between the parts of a TriviaQA context.
_MARKS = re.compile(r"\[(?:PAR|DOC|TLE)\]")


def contains(prediction: str, answers: list[str]) -> float:
    """1.0 if one of the answers occurs in the prediction, ignoring case, else 0.0."""
    written = prediction.lower()
    return float(any(answer.lower() in written for answer in answers))


def completion_prompt(document: Document) -> str:
    return document["text"].strip()


def score_completion(document: Document, results: list[str]) -> dict[str, float]:
    return {"contains": contains(results[0], [document["value"].strip()])}


def question_prompt(document: Document) -> str:
    """The context without a trailing question and full stop, then the question."""
    context, question = _MARKS.sub("", document["context"].strip()), document["question"].strip()
    while question and context.lower().endswith(question.lower()):
        context = context[: -len(question)]
    return f"{context.strip().strip('.')}. {question}"


def question_target(document: Document) -> str:
    return " " + (document["answers"][0] if document["answers"] else "unanswerable")


def score_question(document: Document, results: list[str]) -> dict[str, float]:
    return {"contains": contains(results[0], document["answers"])}
