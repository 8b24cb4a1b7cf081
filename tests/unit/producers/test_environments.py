"""Environments: the same problems everywhere, held-out ones apart, scores exactly 0 or 1, mistakes named."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from anabranch.producers.environments import Problem, Task
from anabranch.schemas.config import TaskSection
from anabranch.schemas.errors import EXIT_CONFIG, ConfigError, RewardError

ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}  # 10 × 10 × {+, −} = 200 problems
TWO_DIGITS = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}


def task(seed: int = 0, **settings: Any) -> Task:
    settings = {"params": TWO_DIGITS, "question_pattern": "problem: (.*)", "heldout_size": 20, **settings}
    return Task(TaskSection(**settings), seed)


def questions(environment: Task, count: int = 50) -> list[str]:
    return [environment.prompt(i).question for i in range(count)]


def test_the_question_is_what_the_pattern_picks_and_the_template_surrounds_it() -> None:
    problem = task(prompt="Q: {question}").prompt(0)
    left, operator, right, equals = problem.question.split()
    assert equals == "="
    assert problem.answer == str(int(left) + int(right) if operator == "+" else int(left) - int(right))
    assert problem.prompt_text == f"Q: {problem.question}"


def test_the_same_seed_gives_the_same_problems_in_any_order_and_another_seed_others() -> None:
    first, second = task(seed=3), task(seed=3)
    assert [second.prompt(i) for i in reversed(range(50))] == [first.prompt(i) for i in range(50)][::-1]
    # neighbouring seeds share no run of problems, although the generators add the index to the seed
    overlap = set(questions(task(seed=3))) & set(questions(task(seed=4)))
    assert len(overlap) <= 3  # 16,200 problems: chance gives 50 · 50 / 16,200 = 0.15


def test_the_same_problems_in_another_process() -> None:
    program = (
        "from anabranch.producers.environments import Task\n"
        "from anabranch.schemas.config import TaskSection\n"
        f"task = Task(TaskSection(params={TWO_DIGITS!r}, question_pattern='problem: (.*)', heldout_size=20), 5)\n"
        "print('\\n'.join([task.prompt(i).question for i in range(5)] + [task.heldout(0).question]))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], capture_output=True, text=True, timeout=60, check=True,
        env={"PYTHONHASHSEED": "77"},
    )  # fmt: skip
    here = task(seed=5)
    assert done.stdout.split("\n")[:6] == [*questions(here, 5), here.heldout(0).question]


def test_an_index_is_another_problem_for_another_attempt() -> None:
    environment = task()
    tries = [environment.prompt(7, attempt).question for attempt in range(4)]
    assert len(set(tries)) == 4
    assert tries[0] == environment.prompt(7).question


def test_held_out_problems_are_distinct_fixed_across_seeds_and_never_trained_on() -> None:
    # half of the whole problem space is held out: a training index meets a held-out one at every second draw
    environment = task(params=ONE_DIGIT, heldout_size=100)
    heldout = [environment.heldout(i).question for i in range(100)]
    assert len(set(heldout)) == 100
    assert not set(heldout) & set(questions(environment, 2000))
    other_seed = task(seed=99, params=ONE_DIGIT, heldout_size=100)
    assert [other_seed.heldout(i).question for i in range(100)] == heldout


def test_the_held_out_set_has_an_end() -> None:
    with pytest.raises(IndexError, match="held-out problem 20 of 20"):
        task(heldout_size=20).heldout(20)


def test_a_problem_space_smaller_than_the_held_out_set_is_refused() -> None:
    with pytest.raises(ConfigError, match="too few different problems"):
        task(params=ONE_DIGIT, heldout_size=201)


def test_a_problem_space_that_is_all_held_out_leaves_nothing_to_train_on() -> None:
    environment = task(params=ONE_DIGIT, heldout_size=200)
    with pytest.raises(ConfigError, match="too few different problems"):
        environment.prompt(0)


@pytest.mark.parametrize("dataset", ["word_ladder", "list_functions", "gcd"])
def test_generators_with_a_size_of_their_own_have_no_last_index(dataset: str) -> None:
    environment = Task(TaskSection(dataset=dataset, heldout_size=2), 0)
    assert environment.prompt(10**9).answer


def test_the_right_answer_scores_one_and_a_text_that_only_contains_it_zero() -> None:
    environment = task()
    problem = Problem("8 + 9 =", "8 + 9 =", "17", {"answer": "17"})
    assert environment.score(problem, " 17\n") == 1.0
    assert environment.score(problem, "18") == 0.0
    assert environment.score(problem, "2217") == 0.0  # the scorer itself gives 0.5: the gold answer is inside
    assert environment.score(problem, "") == 0.0


def test_the_answer_pattern_picks_the_answer() -> None:
    environment = task(answer_pattern=r"answer is (-?\d+)")
    problem = Problem("8 + 9 =", "8 + 9 =", "17", {"answer": "17"})
    assert environment.score(problem, "Well.\nThe answer is 17.") == 1.0
    assert environment.score(problem, "17") == 0.0  # no match, no answer


class Scorer:
    def __init__(self, verdict: float | Exception) -> None:
        self.verdict = verdict

    def score_answer(self, answer: str, entry: object) -> float:
        if isinstance(self.verdict, Exception):
            raise self.verdict
        return self.verdict


@pytest.mark.parametrize(
    ("verdict", "message"),
    [
        (float("nan"), "gave nan"),
        (float("inf"), "gave inf"),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
    ],
)
def test_a_scorer_that_fails_is_named_with_the_answer_it_failed_on(verdict: float | Exception, message: str) -> None:
    environment = task()
    environment._scorer = Scorer(verdict)
    with pytest.raises(RewardError, match=message) as caught:
        environment.score(environment.prompt(0), "17")
    assert "chain_sum" in str(caught.value)
    assert "'17'" in str(caught.value)
    assert caught.value.exit_code == EXIT_CONFIG


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset": "chainsum"}, "did you mean 'chain_sum'"),
        ({"dataset": "ransom_note"}, "other problems in every process"),
        ({"params": {"max_digit": 2}}, "did you mean 'max_digits'"),
        ({"params": {"seed": 2}}, "set by the run"),
        ({"params": {"min_terms": 3, "max_terms": 2}}, "max_terms must be >= min_terms"),
        ({"params": {"min_terms": "two"}}, "chain_sum refuses"),
        ({"answer_pattern": "(["}, "task.answer_pattern.*not a regular expression"),
        ({"question_pattern": "problem"}, "task.question_pattern.*no group"),
        ({"question_pattern": "riddle: (.*)"}, "finds nothing in"),
        ({"prompt": "hello"}, "no {question} in the template"),
    ],
)
def test_a_wrong_task_is_refused_when_it_is_built(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        task(**settings)
