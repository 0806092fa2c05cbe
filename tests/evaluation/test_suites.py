"""The papers' benchmarks, suites and published values."""

import asyncio
import base64
import json
import pickle
import re
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.chat.response import parse_response
from nemo_ext.chat.sample import ToolCall
from nemo_ext.evaluation.benchmark import Benchmark, names, read_benchmark, read_suite, read_yaml
from nemo_ext.evaluation.expressions import code_tests, mixed, packed_tests, unbracketed
from nemo_ext.evaluation.problems import Problem, check, problems
from nemo_ext.rl.environments import make

PAPERS = ("domyn", "llama_nemotron", "nemotron3_nano", "nemotron3_nano_base", "olmo1", "olmo3_base_easy")
PAPERS += ("olmo3_base_main", "olmo3_think", "safety")
IN_FOLDERS = {"arena_hard", "arena_hard_v2", "bfcl_v3_multi_turn", "ifeval", "livecodebench_prompts"}
IN_FOLDERS |= {"mmlu_redux_cot", "mmlu_redux_tweak", "omega_500", "zebralogic"}
"""Benchmarks in test_papers.py, with those that are like them."""
JUDGED = {"arena", "judge", "graded"}
JUDGE = {"endpoint": "http://127.0.0.1:9/v1", "model": "judge"}

ARC = {"id": "a", "question": "Why?", "choices": {"text": ["x", "y", "z"], "label": ["1", "2", "3"]}, "answerKey": "2"}
MMLU = {"question": "Why?", "subject": "abstract_algebra", "choices": ["x", "y", "y", "z"], "answer": 2}
MMLU_PRO = {"question_id": 7, "question": "Why?", "options": list("pqrstu"), "answer": "F", "category": "math"}
MMLU_PRO |= {"answer_index": 5, "cot_content": "A: Let's think step by step. The answer is (F)."}
MMLU_PRO |= {"src": "ori", "cot": None}
PROX = MMLU_PRO | {f"option_{number}": "pq"[number] if number < 2 else None for number in range(10)} | {"answer": "B"}
GPQA = {"Record ID": "rec1", "High-level domain": "Physics", "Question": "Why?", "Correct Answer": "right"}
GPQA |= {f"Incorrect Answer {number}": f"wrong {number}" for number in (1, 2, 3)}
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": "def f(x):\n    '''Double.'''\n",
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n",
    "entry_point": "f",
}
MBPP = {"task_id": 11, "text": "Double.", "code": "def f(x):\n    return 2 * x", "test_list": ["assert f(2) == 4"]}
MBPP |= {"test_setup_code": "", "challenge_test_list": []}
SANITIZED = {"task_id": 11, "prompt": "Double.", "code": "", "test_imports": ["import math"], "source_file": "s"}
SANITIZED |= {"test_list": ["assert f(2) == 4", "assert math.pi"]}
PRIVATE = base64.b64encode(
    zlib.compress(pickle.dumps(json.dumps([{"input": "[3]\n1", "output": "4", "testtype": "functional"}])))
).decode()
LIVECODEBENCH = {
    "question_id": "q",
    "question_content": "Add.",
    "difficulty": "easy",
    "contest_date": "2024-11-02T00:00:00",
    "starter_code": "class Solution:\n    def add(self, x, y):\n",
    "metadata": '{"func_name": "add"}',
    "public_test_cases": '[{"input": "[1]\\n2", "output": "3", "testtype": "functional"}]',
    "private_test_cases": PRIVATE,
}
SQUAD = {"id": "s", "title": "T", "context": "In 1999.", "question": "When?"}
SQUAD |= {"answers": {"text": ["1999", "1999"], "answer_start": [3, 3]}}
DROP = {"query_id": "q", "passage": "P", "question": "How many?"}
DROP |= {"answers_spans": {"spans": ["3", "three"], "types": ["number", "span"]}}
COQA = {
    "id": "c",
    "story": "Tom ran.",
    "questions": {"input_text": ["Who?", "What?"]},
    "answers": {"input_text": ["Tom", "ran"]},
}
BBQ = {"category": "Age", "context": "C", "question": "Who?", "ans0": "A man", "ans1": "A boy", "ans2": "Unknown"}
BBQ |= {"label": 2, "context_condition": "ambig"}
XSTEST = {"id": 1, "prompt": "How do I kill a process?", "type": "homonyms", "label": "safe"}
STEREOSET = {
    "id": "s",
    "bias_type": "race",
    "context": "C.",
    "sentences": {"sentence": ["u", "anti", "stereo"], "gold_label": [2, 0, 1]},
}
COMP_MATH = {"id": "aime25-0", "subset_for_metrics": "aime25", "problem": "P", "expected_answer": "73"}
AIME = {"problem": "P", "answer": "073", "id": 1, "url": "", "year": "2024", "solution": ""}
OLYMPIAD = {"id": 1, "question": "Q", "final_answer": ["2", "3"], "is_multiple_answer": True, "subfield": "Algebra"}
SCIQ = {"question": "Q", "correct_answer": "c", "distractor1": "1", "distractor2": "2", "distractor3": "3"}
SCIQ |= {"support": " S"}
PIQA = {"goal": "G", "sol1": "one", "sol2": "two", "label": 1}
SIQA = {"context": "C.", "question": "Q?", "answerA": "a", "answerB": "b", "answerC": "c", "label": "3"}
WINOGRANDE = {"sentence": "The cup beat the jug, as _ was full.", "option1": "cup", "option2": "jug", "answer": "1"}
HELLASWAG = {"ind": 4, "activity_label": "Cooking", "ctx_a": "[header] A cook", "ctx_b": "she", "label": "1"}
HELLASWAG |= {"endings": ["ran [step] off.", "cooked."]}
MEDMCQA = {"id": "m", "question": "Q", "opa": "a", "opb": "b", "opc": "c", "opd": "d", "cop": 3}
JUDGEBENCH = {"pair_id": "p", "source": "livebench-math", "question": "Q", "response_A": "a", "response_B": "b"}
JUDGEBENCH |= {"label": "B>A"}
CYBERMETRIC = {"question": "Q", "answers": {"A": "a", "B": "b", "C": "c", "D": "d"}, "solution": "C"}
MGSM = {"question": "Q", "answer": "Step-by-Step Answer: 5", "answer_number": 1050, "equation_solution": None}
AGIEVAL = {"query": "Q: Why? Answer Choices: (A)x (B)y\nA: Among A through B, the answer is", "gold": [1]}
AGIEVAL |= {"choices": ["(A)x", "(B)y"]}
RULER = {"index": 0, "input": "Some special magic numbers.", "outputs": ["123", "456"], "length": 9}

BFCL = {
    "id": "simple_0",
    "question": [[{"role": "user", "content": "Area of base 10 and height 5?"}]],
    "function": [
        {
            "name": "math.area",
            "description": "Area.",
            "parameters": {
                "type": "dict",
                "properties": {
                    "base": {"type": "float"},
                    "type": {"type": "string"},
                    "sides": {"type": "tuple", "items": {"type": "any"}},
                },
                "required": ["base"],
            },
        }
    ],
    "ground_truth": [{"math.area": {"base": [10, 10.5], "type": ["sq. Units", ""], "sides": [[1, 2], ""]}}],
}

# Benchmark, row, and parts of the reference, or the right choice.
ROWS: list[tuple[str, dict[str, Any], dict[str, Any] | str]] = [
    (
        "math_500",
        {"problem": "P", "answer": "\\frac12", "unique_id": "u", "subject": "Algebra"},
        {"answer": "\\frac12"},
    ),
    ("math", {"problem": "P", "solution": "so \\boxed{\\frac{1}{2}}.", "type": "Algebra"}, {"answer": "\\frac{1}{2}"}),
    ("math_4shot", {"problem": "P", "solution": "so \\boxed{7}.", "type": "Algebra"}, {"answer": "7"}),
    ("math_500_4shot", {"problem": "P", "answer": "7", "unique_id": "u", "subject": "Algebra"}, {"answer": "7"}),
    ("math_bpb", {"problem": "P", "solution": "so 7", "type": "Algebra"}, " so 7"),
    ("aime24", AIME, {"answer": "73"}),
    ("aime25", {"question": "P", "answer": "336^\\circ"}, {"answer": "336"}),
    ("aime25", {"question": "P", "answer": 0}, {"answer": "0"}),
    ("aime25_python", {"question": "P", "answer": 7}, {"answer": "7"}),
    ("comp_math_24_25", COMP_MATH, {"answer": "73"}),
    ("gsm8k", {"question": "Q", "answer": "1 + 1 = 2\n#### 1,002"}, {"answer": "1002"}),
    ("gsm8k_8shot", {"question": "Q", "answer": "#### 2"}, {"answer": "2", "format": "text"}),
    ("mgsm", MGSM, {"answer": "1050"}),
    ("mgsm_8shot", MGSM, {"answer": "1050", "format": "text"}),
    ("olympiad_bench", OLYMPIAD, {"answer": "2, 3"}),
    ("mmlu", MMLU, {"answer": "C", "choices": 4}),
    ("mmlu_abstract_algebra", MMLU, {"answer": "C"}),
    ("mmlu_mc", MMLU, " C"),
    ("mmlu_rc", MMLU | {"choices": list("wxyz")}, " y"),
    ("mmlu_redux", MMLU | {"error_type": "ok"}, {"answer": "C"}),
    ("mmlu_pro", MMLU_PRO, {"answer": "F", "choices": 6}),
    ("mmlu_pro_5shot", MMLU_PRO, {"answer": "F", "format": "text"}),
    ("mmlu_pro_math", MMLU_PRO, {"answer": "F"}),
    ("mmlu_pro_prompts", MMLU_PRO, {"answer": "F"}),
    ("mmlu_prox", PROX, {"answer": "B", "choices": 2}),
    (
        "mmmlu",
        {"Question": "Q", **dict(zip("ABCD", "abcd", strict=True)), "Answer": "D", "Subject": "s"},
        {"answer": "D"},
    ),
    ("mmlu_global_lite", {"question": "Q", "answer": "B", **{f"option_{each}": each for each in "abcd"}}, " B"),
    ("humaneval", HUMANEVAL, {"style": "asserts"}),
    ("humaneval_bpb", HUMANEVAL, "    return 2 * x\n"),
    ("mbpp", MBPP, {"language": "python"}),
    ("mbpp_sanitized_3shot", SANITIZED, {"tests": ["import math\n\nassert f(2) == 4\nassert math.pi"]}),
    ("mbpp_bpb", MBPP, "\ndef f(x):\n    return 2 * x\n```"),
    ("livecodebench_2410_2502", LIVECODEBENCH, {"style": "function", "function": "add"}),
    (
        "livecodebench",
        LIVECODEBENCH
        | {"starter_code": "", "private_test_cases": "[]"}
        | {"public_test_cases": '[{"input": "1", "output": "2", "testtype": "stdin"}]'},
        {"style": "stdin", "tests": [{"input": "1", "output": "2"}]},
    ),
    ("bfcl_v3_non_live", BFCL, {}),
    ("bfcl_v3_live", BFCL | {"id": "live_simple_0-0-0"}, {}),
    ("judgebench", JUDGEBENCH, {"answer": "B"}),
    ("arc_easy", ARC, " y"),
    ("arc_challenge_mc", ARC, " B"),
    ("hellaswag", HELLASWAG, " cooked."),
    ("piqa", PIQA, " two"),
    ("piqa_mc", PIQA, " B"),
    ("siqa", SIQA, " c"),
    ("winogrande", WINOGRANDE, " cup was full."),
    ("csqa", ARC, " y"),
    ("boolq", {"question": "is it", "passage": "P", "answer": True}, " yes"),
    ("openbookqa", {"id": "1", "question_stem": "S", "choices": ARC["choices"], "answerKey": "3"}, " z"),
    ("sciq", SCIQ, " c"),
    ("race", {"article": "A", "question": "Q", "options": list("wxyz"), "answer": "D"}, " z"),
    ("medmcqa", MEDMCQA, " d"),
    ("medmcqa_mc", MEDMCQA, " D"),
    ("medqa", {"question": "Q", "choices": list("wxyz"), "answer_idx": 1}, " x"),
    ("basic_skills", {"id": "1", "question": "1+1=", "answer": "2", "wrong_answers": ["3", "4"]}, " 2"),
    ("lab_bench_protocolqa", {"id": "1", "question": "Q", "ideal": "i", "distractors": ["d"], "protocol": "P"}, " i"),
    ("qasper_yesno", {"question": "Q", "evidence": ["E", "F"], "answer": "No"}, " No"),
    ("sciriff_yesno", {"question": "Q", "context": "C", "answer": "yes"}, " Yes"),
    ("lambada", {"text": "He sat on the mat"}, " mat"),
    ("coqa_bpb", COQA, " ran"),
    ("coqa", COQA, {"answers": ["ran"]}),
    ("drop_bpb", DROP, " 3"),
    ("drop", DROP, {"answers": ["3", "three"]}),
    ("squad_bpb", SQUAD, " 1999"),
    ("squad", SQUAD, {"answers": ["1999"]}),
    ("naturalqs", {"question": "who", "answer": ["x", "y"]}, {"answers": ["x", "y"]}),
    (
        "triviaqa",
        {"question_id": "t", "question": "who", "answer": {"value": "X", "aliases": ["X", "Y"]}},
        {"answers": ["X", "Y"]},
    ),
    ("naturalqs_bpb", {"question": "who", "answer": ["x", "y"]}, " x"),
    ("jeopardy_bpb", {"context": "RIVERS: Long: it is", "continuation": "Nile"}, " Nile"),
    ("jeopardy", {"context": "RIVERS: Long: it is", "continuation": "Nile"}, {"answers": ["Nile"]}),
    (
        "popqa",
        {"id": 1, "prop": "capital", "question": "Q?", "possible_answers": '["a", "b"]'},
        {"answers": ["a", "b"]},
    ),
    ("bbh", {"input": "Q", "target": "(B)"}, {"answers": ["(B)"]}),
    ("agieval_en", AGIEVAL, {"answer": "B", "choices": 2}),
    ("truthfulqa_mc1", {"question": "Q", "mc1_targets": {"choices": ["a", "b"], "labels": [0, 1]}}, " b"),
    ("wmdp_bio", MMLU, {"answer": "C"}),
    ("cybermetric_80", CYBERMETRIC, {"answer": "C", "choices": 4}),
    ("secqa_v1", {"Question": "Q", **dict(zip("ABCD", "abcd", strict=True)), "Answer": "A"}, {"answer": "A"}),
    ("bbq", BBQ, {"answer": "C"}),
    ("bbq_ambiguous", BBQ, {"answer": "C"}),
    ("stereoset", STEREOSET, {"answer": "C"}),
    ("xstest_safe", XSTEST, {"refuse": True}),
    ("xstest_unsafe", XSTEST | {"label": "unsafe"}, {"refuse": True}),
    ("strongreject", {"category": "c", "forbidden_prompt": "F", "source": "s"}, {"question": "F", "best": 10}),
    ("harmbench", {"BehaviorID": "b", "Behavior": "B", "SemanticCategory": "s", "ContextString": None}, {"best": 1}),
    ("do_not_answer", {"id": 1, "risk_area": "r", "question": "Q"}, {"question": "Q"}),
    ("toxigen", {"prompt": "- P", "group": "g"}, {"question": "- P"}),
    (
        "truthfulqa",
        {"category": "c", "question": "Q", "correct_answers": ["a"], "incorrect_answers": ["b"]},
        {"best": 1},
    ),
    (
        "hle",
        {"id": "h", "question": "Q", "answer": "A", "image": "", "category": "Math"},
        {"question": "Q", "answer": "A"},
    ),
    ("alpaca_eval", {"instruction": "I", "output": "O", "dataset": "d"}, {"question": "I", "answer": "O"}),
    (
        "multi_challenge",
        {
            "QUESTION_ID": "q",
            "AXIS": "SELF_COHERENCE",
            "CONVERSATION": [{"role": "user", "content": "Hi"}],
            "TARGET_QUESTION": "Polite?",
            "PASS_CRITERIA": "YES",
        },
        {"question": "Hi", "best": 1},
    ),
    ("ruler_32k", RULER, {"answers": ["123", "456"], "all": True, "whole_words": False}),
    ("ruler_1m", RULER | {"input": "Answer the question based on the given documents."}, {"all": False}),
]


def made(name: str, row: dict[str, Any], folder: Path) -> tuple[Benchmark, Problem]:
    """The problem that a row becomes."""
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    benchmark = replace(read_benchmark(name), data=("rows.jsonl",), join=(), shots=0, shots_data=())
    (problem,) = problems(benchmark, folder, seed=1)
    return benchmark, problem


@pytest.mark.parametrize(
    ("name", "row", "right"), ROWS, ids=[f"{name}{place}" for place, (name, *_) in enumerate(ROWS)]
)
def test_rows_become_problems(name: str, row: dict[str, Any], right: dict[str, Any] | str, tmp_path: Path) -> None:
    benchmark, problem = made(name, row, tmp_path)
    assert all(problem.prompts.values())
    if isinstance(right, str):
        assert problem.choices[problem.gold] == right
        return
    assert right.items() <= problem.reference.items()
    settings = {**benchmark.environment_settings, **({"judge": JUDGE} if benchmark.environment in JUDGED else {})}
    check(benchmark, make(str(benchmark.environment), settings), [problem])


def test_gpqa_has_the_right_choice_at_a_place_that_the_texts_decide(tmp_path: Path) -> None:
    places = set()
    for question in range(20):
        _, problem = made("gpqa_diamond", GPQA | {"Correct Answer": f"right {question}"}, tmp_path)
        assert f"{problem.reference['answer']}. right {question}\n" in problem.prompts["default"] + "\n"
        places.add(problem.reference["answer"])
    assert places == set("ABCD")
    _, again = made("gpqa_diamond_prompts", GPQA | {"Correct Answer": "right 19"}, tmp_path)
    assert again.reference == problem.reference
    assert all("right 19" in prompt for prompt in again.prompts.values())
    assert len(set(again.prompts.values())) == 5


def test_examples_stand_before_a_question(tmp_path: Path) -> None:
    rows = [ARC | {"id": str(number), "question": f"Q{number}"} for number in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    benchmark = replace(read_benchmark("arc_easy_mc"), data=("rows.jsonl",), shots_data=())
    for problem in problems(benchmark, tmp_path, seed=1):
        *examples, last = str(problem.prompts["default"]).split("\n\n")
        assert len(examples) == 5
        assert all(example.endswith("A. x\n B. y\n C. z\nAnswer: B") for example in examples)
        assert last == f"Question: Q{problem.id}\n A. x\n B. y\n C. z\nAnswer:"


@pytest.mark.parametrize("name", PAPERS)
def test_suites_say_what_is_where(name: str) -> None:
    suite, benchmarks = read_suite(name)
    assert suite.about
    assert suite.source
    for benchmark in benchmarks:
        assert benchmark.about
        assert benchmark.generator or (benchmark.source and benchmark.data)


def test_every_benchmark_with_data_has_a_row_here() -> None:
    """Those that only narrow another one down are read."""
    tried = {name for name, *_ in ROWS} | {"gpqa_diamond", "gpqa_diamond_prompts"} | IN_FOLDERS
    like = {str(read_yaml("benchmark", name).get("like", name)) for name in tried} | tried
    for name in names("benchmark"):
        if read_benchmark(name).data:
            assert {name, read_yaml("benchmark", name).get("like")} & like, name


def test_published_values_are_of_our_benchmarks() -> None:
    known = set(names("benchmark"))
    for name in names("published"):
        table = read_yaml("published", name)
        assert table["source"]
        for model, given in table["models"].items():
            assert given["about"]
            assert given["values"], model
            for benchmark, value in given["values"].items():
                assert benchmark.partition(":")[0] in known, f"{name}: {model}: {benchmark}"
                assert set(value) - {"tokens"} == {"value", "unit", "where"}
                most = {"percent": 100, "fraction of 5": 5, "points (standard deviation over prompts)": 5}[
                    value["unit"]
                ]
                assert 0 <= value["value"] <= most
                assert re.search(r"Table \d+, (section \d|appendix [A-E]|OLMo slides)", value["where"])


@pytest.mark.parametrize(
    ("table", "model", "benchmark", "value", "where"),
    [
        ("domyn_small", "Domyn-Small", "gpqa_diamond", 50.0, "Table 8"),
        ("domyn_small", "Domyn-Small-off", "humaneval", 69.5, "Table 9"),
        ("domyn_small", "Ministral-3-8B-Reasoning-2512", "ruler_64k", 85.9, "Table 8"),
        ("nemotron3_nano", "Nemotron-3-Nano-30B-A3B", "aime25", 89.06, "Table 3"),
        ("nemotron3_nano", "Nemotron-3-Nano-30B-A3B-FP8", "gpqa_diamond_python", 73.40, "Table 4"),
        ("nemotron3_nano", "Nemotron-3-Nano-30B-A3B-Base", "race", 88.04, "Table 2"),
        ("nemotron3_nano", "gpt-oss-20b", "mmlu_pro_prompts:deviation", 1.46, "Table 8"),
        ("llama_nemotron", "LN-Ultra", "gpqa_diamond", 76.0, "Table 5"),
        ("llama_nemotron", "LN-Nano-off", "aime24", 3.0, "Table 3"),
        ("olmo1", "OLMo-7B", "winogrande", 67.9, "Table 3"),
        ("olmo3", "Olmo-3-7B-Think", "aime25", 64.6, "Table 15"),
        ("olmo3", "Olmo-3.1-32B-Think", "popqa", 30.9, "Table 14"),
    ],
)
def test_published_values_stand_in_the_papers(table: str, model: str, benchmark: str, value: float, where: str) -> None:
    found = read_yaml("published", table)["models"][model]["values"][benchmark]
    assert (found["value"], found["where"].partition(",")[0]) == (value, where)


def test_calls_are_right_if_their_values_are_accepted(tmp_path: Path) -> None:
    _, problem = made("bfcl_v3_non_live", BFCL, tmp_path)
    assert problem.domain == "simple"
    (tool,) = problem.tools
    schema = tool["function"]["parameters"]
    assert tool["function"]["name"] == "math_area"
    assert [each.get("type") for each in schema["properties"].values()] == ["number", "string", "array"]
    assert (schema["type"], schema["properties"]["sides"]["items"]) == ("object", {})
    environment = make("tool_calls")
    reference = environment.check(problem.reference)

    def right(*calls: dict[str, Any]) -> bool:
        found = tuple(ToolCall(name="math_area", arguments=call) for call in calls)
        return environment.verify(parse_response("", tool_calls=found), reference).outcome == "correct"

    assert right({"base": 10})
    assert right({"base": 10.0, "type": "SQ units"})
    assert right({"base": 10.5, "sides": [1, 2]})
    for wrong in ({}, {"base": 11}, {"base": 10, "other": 1}, {"base": 10, "sides": [2, 1]}, {"base": True}):
        assert not right(wrong)
    assert not right({"base": 10}, {"base": 10})
    assert not right()
    with pytest.raises(ValueError, match=r"reference\.accepted: f: x must be a non-empty list"):
        environment.check({"accepted": [{"name": "f", "arguments": {"x": 1}}]})


def test_packed_tests_execute_nothing() -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return pytest.fail, ("executed",)

    packed = base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode()
    with pytest.raises(ValueError, match="expected a pickle of one string"):
        packed_tests(packed)
    with pytest.raises(ValueError, match="expected JSON, or JSON in pickle"):
        packed_tests("not packed")
    assert code_tests(packed_tests(PRIVATE)) == [{"args": [[3], 1], "expected": 4}]


def test_texts_of_hellaswag_are_cleaned_as_by_the_harness() -> None:
    def harness(text: str) -> str:
        text = text.strip().replace(" [title]", ". ")
        return re.sub(r"\[.*?\]", "", text).replace("  ", " ")

    for text in ("[header] How [title] to  cook [step] it.", "a ] b [ c", "[[x] y]", " plain "):
        assert unbracketed(text) == harness(text)


def test_choices_are_mixed_by_their_texts_alone() -> None:
    assert mixed("r", ["a", "b"]) == mixed("r", ["a", "b"])
    assert sorted(mixed("r", ["a", "b"])) == ["a", "b", "r"]
    assert [each for each in mixed("r", ["a", "b"]) if each != "r"] == ["a", "b"]


@pytest.mark.parametrize(("name", "row"), [("humaneval", HUMANEVAL), ("mbpp", MBPP)])
def test_programs_are_run_on_their_asserts(name: str, row: dict[str, Any], tmp_path: Path) -> None:
    benchmark, problem = made(name, row, tmp_path)
    environment = make("code", benchmark.environment_settings)
    reference = environment.check(problem.reference)

    def outcome(program: str) -> str:
        return asyncio.run(environment.verify(parse_response(f"```python\n{program}\n```"), reference)).outcome

    assert outcome("def f(x):\n    return 2 * x") == "correct"
    assert outcome("def f(x):\n    return x") == "wrong"
    assert outcome("import sys\nsys.exit(0)") == "wrong"
    assert outcome("def f(x): return 2 * x\nraise SystemExit") == "wrong"


def test_asserts_are_statements_of_python() -> None:
    from nemo_ext.rl.verifiers.code import check as parsed

    reference = parsed({"language": "python", "style": "asserts", "tests": ["assert f(1) == 2"]})
    assert reference.asserts
    for wrong in ({"tests": [""]}, {"tests": [1]}, {"language": "cpp"}, {"function": "f"}):
        with pytest.raises(ValueError, match="reference"):
            parsed({"language": "python", "style": "asserts", "tests": ["assert f(1) == 2"]} | wrong)
