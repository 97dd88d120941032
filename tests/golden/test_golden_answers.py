"""Answers of the planner to drawn questions: plans, predictions and refusals as they stand on file."""

from __future__ import annotations

import json

import pytest

from golden.questions import QUESTIONS, answer, drawn, question_text, read_answers

ANSWERS = read_answers()
SAMPLE = (1, 3, 17)
"""Questions of the suite; `make golden-answers` asks all of them."""


def test_all_questions_have_an_answer_on_file() -> None:
    assert {number: each["question"] for number, each in ANSWERS.items()} == {
        str(number): question_text(number) for number in range(QUESTIONS)
    }


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=[] if n in SAMPLE else pytest.mark.slow) for n in range(QUESTIONS)]
)
def test_an_answer_is_the_one_on_file(number: int) -> None:
    # Through JSON, as the file has it: tuples are lists there.
    assert json.loads(json.dumps(answer(drawn(number)))) == ANSWERS[str(number)]["answer"]
