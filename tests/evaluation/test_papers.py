"""Benchmarks of the papers on five made-up rows each, in the folders and columns of the public data."""

import asyncio
import decimal
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.chat.response import Response, parse_response
from nemo_ext.chat.sample import ToolCall
from nemo_ext.evaluation.benchmark import read_benchmark
from nemo_ext.evaluation.problems import Missing, Problem, metrics, problems
from nemo_ext.evaluation.score import Scorer
from nemo_ext.evaluation.store import Key, Sample, Score
from nemo_ext.rl.environments import make
from nemo_ext.rl.worlds import bfcl

FIVE = range(5)
ALL_KEYS = dict.fromkeys(("N", "keyword1", "num_words", "relation", "word", "prompt_to_repeat"))
IFEVAL = [
    {"key": 1000, "prompt": "Write.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
    {"key": 1001, "prompt": "Shout.", "instruction_id_list": ["change_case:english_capital"], "kwargs": [ALL_KEYS]},
    {
        "key": 1002,
        "prompt": "Tell.",
        "instruction_id_list": ["length_constraints:number_words", "detectable_format:title"],
        "kwargs": [{"relation": "at least", "num_words": 3}, {}],
    },
    {"key": 1003, "prompt": "Ask.", "instruction_id_list": ["startend:quotation"], "kwargs": [None]},
    {
        "key": 1004,
        "prompt": "Sing.",
        "instruction_id_list": ["combination:repeat_prompt", "punctuation:no_comma"],
        "kwargs": [{"prompt_to_repeat": "Sing."}, {}],
    },
]
IFBENCH = [
    {"key": "0", "prompt": "P", "instruction_id_list": ["format:no_whitespace"], "kwargs": [ALL_KEYS]},
    {"key": "1", "prompt": "Q", "instruction_id_list": ["format:parentheses"], "kwargs": [ALL_KEYS]},
    {"key": "2", "prompt": "Say it.", "instruction_id_list": ["repeat:repeat_simple"], "kwargs": [ALL_KEYS]},
    {"key": "3", "prompt": "R", "instruction_id_list": ["custom:multiples"], "kwargs": [ALL_KEYS]},
    {
        "key": "4",
        "prompt": "S",
        "instruction_id_list": ["format:no_whitespace", "custom:multiples"],
        "kwargs": [ALL_KEYS, ALL_KEYS],
    },
]
ZEBRA = [
    {
        "id": f"lgp-test-2x2-{number}",
        "size": "2*2",
        "puzzle": f"There are 2 houses ({number}).",
        "solution": {"header": ["House", "Name", "Drink"], "rows": [["1", "Eric", "tea"], ["2", "Arnold", "milk"]]},
        "created_at": "2024-07-03T21:21:29",
    }
    for number in FIVE
]
OMEGA = [
    {
        "id": f"o{number}",
        "family": "algebra_linear_equation",
        "messages": [
            {"role": "user", "content": f"{number} + 1?\n\nPresent the answer in LaTex format: \\boxed{{Your answer}}"}
        ],
        "ground_truth": str(number + 1),
        "dataset": "omega",
    }
    for number in FIVE
]
STEREOSET = [
    {
        "id": f"s{number}",
        "target": "chess player",
        "bias_type": "profession",
        "context": "He played.",
        "sentences": {"sentence": ["He thought.", "He won.", "Fish swim."], "gold_label": [1, 0, 2]},
    }
    for number in FIVE
]
STRONGREJECT = [{"category": "c", "source": "custom", "forbidden_prompt": f"F{number}"} for number in FIVE]
QUESTIONS = [
    {"uid": f"u{number}", "category": "arena-hard-v0.1", "cluster": "ABC Puzzles", "prompt": f"P{number}"}
    for number in FIVE
]
HARD = [
    {
        "uid": f"u{number}",
        "category": "hard_prompt" if number < 3 else "creative_writing",
        "subcategory": "coding",
        "prompt": f"P{number}",
    }
    for number in FIVE
]
ANSWERS = [
    {
        "uid": f"u{number}",
        "ans_id": "a",
        "model": "baseline",
        "messages": [
            {"role": "user", "content": f"P{number}"},
            {"role": "assistant", "content": {"answer": f"theirs {number}"}},
        ],
        "tstamp": 1744155079.1,
        "metadata": {"token_len": 2},
    }
    for number in FIVE
]
REDUX = [
    {
        "question": f"Q{number}?",
        "choices": ["a", "b", "c", "d"],
        "answer": 1,
        "error_type": "ok",
        "source": None,
        "correct_answer": None,
        "potential_reason": None,
    }
    for number in FIVE
]
SOLVED = [REDUX[0] | {"subject": "anatomy", "question": f"E{number}?", "solution": "It is b."} for number in FIVE]
LIVECODEBENCH = [
    {
        "question_id": f"q{number}",
        "question_content": "Add.",
        "difficulty": "easy",
        "platform": "leetcode",
        "contest_date": "2024-11-02T00:00:00",
        "starter_code": "class Solution:\n    def add(self, x, y):\n" if number else "",
        "metadata": '{"func_name": "add"}' if number else "{}",
        "public_test_cases": json.dumps(
            [{"input": "1\n2", "output": "3", "testtype": "functional" if number else "stdin"}]
        ),
        "private_test_cases": "[]",
    }
    for number in FIVE
]
CALLS = [
    {
        "id": f"simple_{number}",
        "question": [[{"role": "user", "content": "Area?"}]],
        "function": [{"name": "area", "description": "", "parameters": {"type": "dict", "properties": {}}}],
    }
    for number in range(4)
] + [{"id": "irrelevance_0", "question": [[{"role": "user", "content": "Hi"}]], "function": []}]
TRUTHS = [{"id": row["id"], "ground_truth": [{"area": {}}]} for row in CALLS[:4]]

AXES = ("INFERENCE_MEMORY", "INSTRUCTION_RETENTION", "SELF_COHERENCE", "RELIABLE_VERSION_EDITING", "SELF_COHERENCE")
CHALLENGES = [
    {
        "QUESTION_ID": f"67455268{number}",
        "AXIS": axis,
        "CONVERSATION": [
            {"role": "user", "content": "I eat no nuts."},
            {"role": "assistant", "content": "Noted."},
            {"role": "user", "content": f"Dessert {number}?"},
        ],
        "TARGET_QUESTION": "Is the dessert free of nuts?",
        "PASS_CRITERIA": "YES",
    }
    for number, axis in enumerate(AXES)
]
FILES: dict[str, dict[str, Sequence[Mapping[str, Any]]]] = {
    "ifeval": {"IFEval/ifeval_input_data.jsonl": IFEVAL},
    "ifbench": {"ifbench/IFBench_test.jsonl": IFBENCH},
    "zebralogic": {"zebralogic/test.jsonl": ZEBRA},
    "omega_500": {"omega_500/train.jsonl": OMEGA},
    "stereoset": {"stereoset/validation.jsonl": STEREOSET},
    "strongreject": {"strongreject/strongreject_dataset.jsonl": STRONGREJECT},
    "arena_hard": {
        "arena-hard-v0.1/question.jsonl": QUESTIONS,
        "arena-hard-v0.1/model_answer/gpt-4-0314.jsonl": ANSWERS,
    },
    "arena_hard_v2": {
        "arena-hard-v2.0/question.jsonl": HARD,
        "arena-hard-v2.0/model_answer/o3-mini-2025-01-31.jsonl": ANSWERS,
    },
    "arena_hard_v2_creative": {
        "arena-hard-v2.0/question.jsonl": HARD,
        "arena-hard-v2.0/model_answer/gemini-2.0-flash-001.jsonl": ANSWERS,
    },
    "multi_challenge": {"multi_challenge/benchmark_questions.jsonl": CHALLENGES},
    "mmlu_redux_cot": {"mmlu_redux/anatomy/test.jsonl": REDUX, "mmlu_redux_cot/solved.jsonl": SOLVED},
    "mmlu_redux_tweak": {"mmlu_redux_tweak/test.jsonl": REDUX + SOLVED},
    "livecodebench_prompts": {"livecodebench/test6.jsonl": LIVECODEBENCH},
    "bfcl_v3_non_live": {
        "bfcl_v3/non_live/BFCL_v3_simple.jsonl": CALLS,
        "bfcl_v3/non_live_answers/BFCL_v3_simple.jsonl": TRUTHS,
    },
}


def read(name: str, folder: Path) -> dict[str, Problem]:
    """A benchmark's problems on its five rows."""
    for place, rows in FILES[name].items():
        path = folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {problem.id: problem for problem in problems(read_benchmark(name), folder, seed=1)}


def scored(name: str, problem: Problem, answer: str, judge: Mapping[str, Any] | None = None) -> Score:
    """The score of an answer to a problem."""
    scorer = Scorer(read_benchmark(name), problem.environment, judge)
    prompt = next(iter(problem.prompts))
    sample = Sample(key=Key(name, problem.id, prompt, "default", 0), asked="", answer=answer)
    try:
        return asyncio.run(scorer.score(problem, sample))
    finally:
        scorer.close()


def test_rows_are_read_from_the_public_folders(tmp_path: Path) -> None:
    counts = {name: len(read(name, tmp_path)) for name in FILES}

    assert counts == dict.fromkeys(FILES, 5) | {
        "arena_hard_v2": 3,
        "arena_hard_v2_creative": 2,
        "mmlu_redux_tweak": 10,
    }
    cot = next(iter(read("mmlu_redux_cot", tmp_path).values())).prompts["default"]
    assert str(cot).count("The answer is B.") == 5
    assert str(cot).endswith("D. d\nAnswer: Let's think step by step.")
    prompts = read("livecodebench_prompts", tmp_path)["q0"].prompts
    assert len(set(prompts.values())) == 4 and all("Add." in str(prompt) for prompt in prompts.values())
    challenge = read("multi_challenge", tmp_path)["674552683"]
    assert challenge.domain == "RELIABLE_VERSION_EDITING" and challenge.reference["question"] == "Dessert 3?"
    assert challenge.reference["rubric"].endswith("is YES, else 0: Is the dessert free of nuts?")
    assert read("bfcl_v3_non_live", tmp_path)["irrelevance_0"].reference == {"accepted": []}


def test_the_axes_of_multi_challenge_have_equal_weights(tmp_path: Path) -> None:
    benchmark, rows = read_benchmark("multi_challenge"), read("multi_challenge", tmp_path)
    correct = {"674552680": 1.0, "674552681": 0.0, "674552682": 1.0, "674552683": 1.0, "674552684": 0.0}
    pairs = [metrics(benchmark, rows[name], score, None)["axes"] for name, score in correct.items()]

    assert sum(pair[0] for pair in pairs) == pytest.approx(1 / 113 + 1 / 50 + 1 / 41)  # type: ignore[index]
    assert sum(pair[1] for pair in pairs) == pytest.approx(1 / 113 + 1 / 69 + 2 / 50 + 1 / 41)  # type: ignore[index]


def test_live_calls_without_expected_calls_are_left_out(tmp_path: Path) -> None:
    for folder, rows in (("live", CALLS), ("live_answers", TRUTHS)):
        (tmp_path / "bfcl_v3" / folder).mkdir(parents=True)
        (tmp_path / "bfcl_v3" / folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    relevance = json.dumps(CALLS[0] | {"id": "live_relevance_3-3-0"})
    (tmp_path / "bfcl_v3/live/BFCL_v3_live_relevance.jsonl").write_text(relevance)

    assert len(problems(read_benchmark("bfcl_v3_live"), tmp_path, seed=1)) == len(CALLS)


def test_joined_rows_must_exist_and_be_unique(tmp_path: Path) -> None:
    read("arena_hard", tmp_path)
    path = tmp_path / "arena-hard-v0.1/model_answer/gpt-4-0314.jsonl"
    path.write_text(path.read_text() + json.dumps(ANSWERS[0] | {"messages": []}) + "\n")
    with pytest.raises(ValueError, match=r"row of .*gpt-4-0314.jsonl has the same id 'u0'"):
        problems(read_benchmark("arena_hard"), tmp_path, seed=1)
    path.unlink()
    with pytest.raises(Missing, match=r"gpt-4-0314\.jsonl: no such file; get it from github\.com/lmarena"):
        problems(read_benchmark("arena_hard"), tmp_path, seed=1)


@pytest.mark.slow  # lm_eval takes long to import
def test_ifeval_counts_as_the_harness_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nltk = pytest.importorskip("nltk")
    pytest.importorskip("langdetect")
    pytest.importorskip("immutabledict")
    monkeypatch.setattr(nltk.data, "find", lambda name: name)  # no rule above splits sentences
    utils = pytest.importorskip("lm_eval.tasks.ifeval.utils")
    answers = ("", "Sing.\nSing it twice.", "I say:\nA TITLE <<OF IT>>, HERE\n*end*", '"WELL DONE"')
    for row, answer in itertools.product(IFEVAL, answers):
        theirs = utils.process_results(row | {"kwargs": [each or {} for each in row["kwargs"]]}, [answer])
        score = scored("ifeval", read("ifeval", tmp_path)[str(row["key"])], answer)

        assert score.score == theirs["prompt_level_strict_acc"]
        assert score.more["loose"] == theirs["prompt_level_loose_acc"]
        for kind in ("strict", "loose"):
            followed = theirs[f"inst_level_{kind}_acc"]
            assert tuple(score.more[f"instruction_{kind}"]) == (sum(followed), len(followed))


def test_ifbench_with_its_own_checkers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nltk = pytest.importorskip("nltk")
    monkeypatch.setattr(nltk.data, "find", lambda name: name)
    monkeypatch.setattr(nltk, "download", lambda *names, **more: False)
    pytest.importorskip("ifbench.instructions_registry")
    found = read("ifbench", tmp_path)

    assert [scored("ifbench", found[key], "ItIsSo").score for key in "01234"] == [1, 0, 0, 0, 0]
    assert scored("ifbench", found["2"], "Only output this sentence here, ignore all other requests.").score == 1
    last = scored("ifbench", found["4"], "Itisso\n*A b*")
    assert (last.more["instruction_strict"], last.more["instruction_loose"], last.more["loose"]) == ((0, 2), (1, 2), 0)


def test_a_grid_counts_if_every_cell_is_right(tmp_path: Path) -> None:
    problem = next(iter(read("zebralogic", tmp_path).values()))
    assert '"House 2": {"Name": "___", "Drink": "___"}\n}}' in str(problem.prompts["default"])
    right = {"House 1": {"Name": "Eric", "Drink": "Tea"}, "House 2": {"Name": "Arnold", "Drink": "milk"}}

    def cells(answer: str) -> tuple[float | None, tuple[int, int]]:
        score = scored("zebralogic", problem, answer)
        return score.score, tuple(score.more["cells"])

    assert cells(f"{{x}} {json.dumps({'solution': {}})} so\n```json\n{json.dumps({'solution': right})}\n```") == (
        1,
        (4, 4),
    )
    assert cells(json.dumps({"solution": right | {"House 1": {"Name": ["Eric"]}}})) == (0, (3, 4))
    for wrong in ("", "{" * 5000, '{"a":' * 5000, "[1]", '{"solution": null}', json.dumps({"solution": [right]})):
        assert cells(wrong) == (0, (0, 4))


def test_blank_solutions_of_a_grid_are_refused(tmp_path: Path) -> None:
    read("zebralogic", tmp_path)
    path = tmp_path / "zebralogic/test.jsonl"
    path.write_text(path.read_text().replace("milk", "___"))
    with pytest.raises(ValueError, match=r"cells of the solution are blank .*ZebraLogicBench-private"):
        problems(read_benchmark("zebralogic"), tmp_path, seed=1)


def test_omega_takes_the_box(tmp_path: Path) -> None:
    problem = next(each for each in read("omega_500", tmp_path).values() if each.reference["answer"] == "3")
    assert (scored("omega_500", problem, "\\boxed{3}").score, scored("omega_500", problem, "\\boxed{4}").score) == (
        1,
        0,
    )


def test_harm_is_graded_with_a_rate_and_two_composites(endpoint: Any, reply: Any, tmp_path: Path) -> None:
    problem = next(iter(read("strongreject", tmp_path).values()))
    for said, expected in (
        ("[[0]]", (0, {"jailbreak_rate": 0, "strongreject": 0})),
        ("[[1]]", (0.1, {"jailbreak_rate": 1, "strongreject": 0})),
        ("[[2]]", (0.2, {"jailbreak_rate": 1, "strongreject": 0})),
        ("[[10]]", (1, {"jailbreak_rate": 1, "strongreject": 1})),
    ):
        endpoint.reply = lambda payload, said=said: reply(text=said)
        score = scored("strongreject", problem, "Well.", {"endpoint": endpoint.url, "model": "m"})
        assert (score.score, score.more) == expected


def test_metrics_reach_the_report_and_the_papers_table(
    evaluate: Callable[..., tuple[int, str]], results: Any, answering: Any, reply: Any, tmp_path: Path, command: Any
) -> None:
    read("stereoset", tmp_path / "data")
    letters = iter("AABCA")
    answering.reply = lambda payload: reply(text=f"Answer: {next(letters)}")
    (tmp_path / "suite.yaml").write_text(json.dumps({"benchmarks": ["stereoset"]}))
    code, output = evaluate(f"suite={tmp_path / 'suite.yaml'}")

    assert code == 0, output
    assert results()["benchmarks"]["stereoset"]["metrics"] == {"avg@1": 0.6, "lms": 0.8, "ss": 0.75}
    ended = command("compare", f"runs=[{tmp_path / 'run'}]", "paper=domyn_small", f"output={tmp_path / 'compare'}")
    table = (tmp_path / "compare" / "compare.md").read_text()
    assert "| stereoset:lms | 80.0 | 97.4 (" in table, ended
    assert "| strongreject | - | 12.492 (" in table


SHOP = """
class Shop:
    def _load_scenario(self, config, long_context=False):
        self.stock = dict(config.get("stock", {}), **({"extra": 1} if long_context else {}))

    def buy(self, name, amount=1):
        self.stock[name] -= amount
        return {"left": self.stock[name]}

    def look(self):
        return self.stock

    def erase(self):
        self.stock.clear()
"""
CONFIG = """
MULTI_TURN_FUNC_DOC_FILE_MAPPING = {"Shop": "shop.json", "Web": "shop.json"}
OMIT_STATE_INFO_CLASSES = ["Web"]
CLASS_FILE_PATH_MAPPING = {"Shop": "bfcl_eval.shop"}
STATELESS_CLASSES = []
"""
TURNS = {
    "id": "multi_turn_miss_func_0",
    "question": [[{"role": "user", "content": "Two pears."}], [{"role": "user", "content": "Look."}], []],
    "initial_config": {"Shop": {"stock": {"pear": 5}}},
    "involved_classes": ["Shop"],
    "missed_function": {"2": ["look"]},
    "ground_truth": [["buy('pear', amount=2)"], [], ["look()"]],
}


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package in place of bfcl-eval, with one program."""
    root = tmp_path / "package" / "bfcl_eval"
    documents = [
        {"name": name, "description": "", "parameters": {"type": "dict", "properties": {}}} for name in ("buy", "look")
    ]
    for place, text in {
        "__init__.py": "",
        "constants/__init__.py": "",
        "constants/executable_backend_config.py": CONFIG,
        "shop.py": SHOP,
        "data/multi_turn_func_doc/shop.json": "\n".join(map(json.dumps, documents)),
    }.items():
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        (root / place).write_text(text)
    for name in [name for name in sys.modules if name.partition(".")[0] == "bfcl_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(root.parent)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "bfcl_eval"]:
        del sys.modules[name]
    bfcl._documents.cache_clear()


def calls(*named: tuple[str, Mapping[str, Any]]) -> Response:
    """A response with calls."""
    made = tuple(ToolCall(name=name, arguments=arguments, id=name) for name, arguments in named)
    return parse_response("", tool_calls=made)


def test_multi_turn_conversations_end_in_the_expected_states(shop: None, tmp_path: Path) -> None:
    truth = {"id": TURNS["id"], "ground_truth": TURNS["ground_truth"]}
    FILES["bfcl_v3_multi_turn"] = {
        "bfcl_v3/multi_turn/BFCL_v3_multi_turn_miss_func.jsonl": [
            {key: value for key, value in TURNS.items() if key != "ground_truth"}
        ],
        "bfcl_v3/multi_turn_answers/BFCL_v3_multi_turn_miss_func.jsonl": [truth],
    }
    (problem,) = read("bfcl_v3_multi_turn", tmp_path).values()
    environment = make("bfcl_multi_turn")
    assert [tool["function"]["name"] for tool in problem.tools] == ["buy"]
    assert environment.begin is not None
    reference = environment.check(problem.reference)

    session = environment.begin(reference)
    (result,) = session.step(calls(("buy", {"name": "pear", "amount": 2})))
    assert (result.role, result.content, result.tool_call_id) == ("tool", '{"left": 3}', "buy")
    assert [each.content for each in session.step(parse_response("Done."))] == ["Look."]
    (result,) = session.step(calls(("erase", {})))  # not documented
    assert result.content == "Error during execution: name 'erase' is not defined"
    for large in ({"exponent": 10**9}, {"decimal_places": -(10**10)}, {"precision": "1000000000"}):
        (result,) = session.step(calls(("buy", {"name": "pear", **large})))
        assert result.content == "Error during execution: numbers over 1000 are not allowed here"
    (added,) = session.step(parse_response("I cannot."))
    assert '"name": "look"' in added.content
    session.step(calls(("look", {})))
    assert session.step(parse_response("Here.")) == ()
    assert session.verdict().outcome == "correct"

    for steps, why in (
        ([], "turn 0: the conversation ended early"),
        ([parse_response("No.")], "turn 0: no calls"),
        ([calls(("buy", {"name": "pear"})), parse_response("Done.")], "turn 0: unexpected state of Shop"),
        (
            [
                *(calls(("buy", {"name": "pear", "amount": 2})), parse_response("Done."), parse_response("I cannot.")),
                *(calls(("buy", {"name": "pear", "amount": 0})), parse_response("Done.")),
            ],
            'turn 2: missing result {"pear": 3}',
        ),
        ([calls(("look", {}))] * 21, "turn 0: more than 20 responses with calls"),
    ):
        session = environment.begin(reference)
        for step in steps:
            session.step(step)
        assert session.verdict().outcome == "wrong"
        assert why in session.verdict().reason
    with pytest.raises(ValueError, match=r"ground_truth: 'buy\(open\(\)\)' is not a call with literal arguments"):
        environment.check({**problem.reference, "ground_truth": [["buy(open())"], [], []]})
    with pytest.raises(ValueError, match="unknown program 'Web'"):
        environment.check({**problem.reference, "involved_classes": ["Web"]})


def test_a_call_has_a_precision_of_its_own(shop: None, monkeypatch: pytest.MonkeyPatch) -> None:
    mpmath = pytest.importorskip("mpmath")
    running, before = list[int](), (mpmath.mp.dps, decimal.getcontext().prec)

    def look(self: Any, precision: int) -> dict[str, Any]:
        running.append(precision)
        mpmath.mp.dps = decimal.getcontext().prec = precision
        time.sleep(0.01)
        running.remove(precision)
        return {"result": mpmath.nstr(mpmath.log(2), precision), "others": len(running)}

    programs = bfcl.Programs(bfcl.check({"question": [[]], "involved_classes": ["Shop"], "ground_truth": [[]]}))
    monkeypatch.setattr(type(programs.instances["Shop"]), "look", look)
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda number: programs.call("look", precision=2 + number % 2 * 7), range(8)))

    assert {(json.loads(result)["result"], json.loads(result)["others"]) for result in results} == {
        ("0.69", 0),
        ("0.693147181", 0),
    }
    programs.call("look", precision=5)
    assert (mpmath.mp.dps, decimal.getcontext().prec) == before
