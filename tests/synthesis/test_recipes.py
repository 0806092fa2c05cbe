"""Every recipe with models that answer by rules and a known outcome, and its files read by the next job."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.chat.formats import to_sample
from nemo_ext.job.config import compose
from nemo_ext.rl.tasks import generate
from nemo_ext.rl.worlds.python_tool import TOOL
from nemo_ext.rl.worlds.world import solution_calls
from nemo_ext.synthesis.settings import Recipe
from nemo_ext.synthesis.source_code import lean_excluded

Run = Callable[..., tuple[int, str]]
Model = Callable[..., Any]
Written = Callable[..., Path]
Read = Callable[..., list[dict[str, Any]]]
FOLDER = Path(__file__).parents[2] / "hydra_conf" / "synthesize"


def sum_of(prompt: str) -> int:
    return sum(map(int, re.findall(r"\d+", prompt)))


def test_worked_solutions_become_traces_of_a_model_without_modes(run_recipe: Run) -> None:
    def solve(prompt: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        assert "End with" not in prompt and len(payload["messages"]) == 7  # three solved examples
        total = sum_of(prompt)
        output = {0: f"The answer is {total}", 1: f"so {total + 1}.\nThe answer is {total + 1}"}
        return {"content": output.get(total % 4, f"It is {total}.\nThe answer is {total}")}

    rows = [
        {
            "id": f"q{number}",
            "environment": "math",
            "prompt": [{"role": "user", "content": f'What is {number} + 5? End with "The answer is" and the answer.'}],
            "reference": {"answer": str(number + 5), "format": "text"},
        }
        for number in range(12)
    ]
    rows.append({**rows[0], "id": "other", "environment": "multiple_choice", "reference": {"answer": "A"}})

    output = run_recipe("worked_traces", rows, solve)

    found = {record["id"].partition("/")[0]: record for record in output.records("conversations")}
    assert set(found) == {f"q{number}" for number in range(12) if (number + 5) % 4 > 1}
    sample = to_sample(found["q1"], id="q1")
    assert sample.messages[0].content.endswith("and the answer.")
    assert (sample.messages[1].reasoning, sample.messages[1].content) == ("It is 6.", "The answer is 6")
    assert output.steps["known"]["dropped"]["no examples of its environment"] == 1


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.yaml")))
def test_recipes_name_their_source(name: str) -> None:
    recipe = Recipe.from_config(compose("synthesize", [f"recipe={name}", "input=x", "output=y"]))

    assert recipe.name == name and recipe.about and recipe.roles


def test_traces_are_verified_and_the_shortest_stay(run_recipe: Run, model: Model) -> None:
    def solve(prompt: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        right = payload["seed"] % 4 != 0
        return {
            "reasoning_content": "step " * (payload["seed"] % 5 + 1),
            "content": f"The sum is \\boxed{{{sum_of(prompt) + (not right)}}}.",
        }

    rows = [{"id": f"q{number}", "question": f"What is {number} + 5?", "answer": number + 5} for number in range(12)]
    teacher = model(solve)

    output = run_recipe("verified_traces", rows, teacher)

    found = output.records("conversations")
    assert found
    for record in found:
        sample = to_sample(record, id=record["id"])
        assert str(sum_of(sample.messages[0].content)) in sample.messages[-1].content
        assert sample.messages[-1].reasoning and record["thinking"] is True
    per_question = [sum(record["id"].startswith(f"{row['id']}/") for record in found) for row in rows]
    assert max(per_question) <= 2
    right = output.steps["right"]
    assert right["dropped"]["wrong"] == sum(payload["seed"] % 4 == 0 for payload in teacher.requests)
    tasks = output.records("tasks")
    assert {task["id"] for task in tasks} <= {row["id"] for row in rows}
    assert all(task["reference"] == {"answer": str(sum_of(task["prompt"]))} for task in tasks)


def test_a_box_is_asked_for_and_answers_without_one_are_counted_apart(run_recipe: Run, model: Model) -> None:
    def solve(prompt: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        assert prompt.count("\\boxed{") == 1
        if payload["seed"] % 4 == 0:
            return {"content": "It depends."}
        return {
            "content": f"\\boxed{{{sum_of(prompt)}}}",
            "finish_reason": "length" if payload["seed"] % 4 == 1 else "stop",
        }

    rows = [{"question": f"What is {number} + 5?", "answer": number + 5} for number in range(5)]
    rows += [{"question": "What is 9 + 9? Write \\boxed{sum}.", "environment": "math", "reference": {"answer": "18"}}]
    teacher = model(solve)

    output = run_recipe("verified_traces", rows, teacher)

    seeds = [payload["seed"] % 4 for payload in teacher.requests]
    assert output.steps["right"]["dropped"] == {"no answer in the form that is verified": seeds.count(0)}
    cut = seeds.count(1)
    assert f"solve, truncated: {cut} ({cut / len(seeds):.1%})" in (output.folder / "README.md").read_text()
    assert all("\\boxed" in task["prompt"] for task in output.records("tasks"))


def test_without_a_reference_answers_vote(run_recipe: Run) -> None:
    def solve(prompt: str, payload: Mapping[str, Any]) -> str:
        if "hopeless" in prompt:
            return f"\\boxed{{{payload['seed']}}}"
        return f"So it is \\boxed{{{sum_of(prompt) + (payload['seed'] % 5 == 0)}}}."

    rows = [{"id": "a", "question": "What is 2 + 2?"}, {"id": "b", "question": "A hopeless one"}]

    output = run_recipe("verified_traces", rows, solve)

    assert {record["id"].partition("/")[0] for record in output.records("conversations")} == {"a"}
    assert all("{4}" in record["messages"][-1]["content"] for record in output.records("conversations"))
    assert output.steps["vote"]["dropped"]["no majority"] == 1


def test_other_environments_verify_too(run_recipe: Run) -> None:
    import importlib

    tasks, solutions = [], {}
    for name in ("programs", "tables", "schemas", "instructions"):
        module = importlib.import_module(f"nemo_ext.rl.tasks.{name}")
        for task in generate(name, 2, seed=3):
            tasks.append(task.record())
            solutions[task.prompt[-1].content] = module.solution(task)

    def solve(prompt: str, payload: Mapping[str, Any]) -> str:
        return str(solutions[prompt]) if payload["seed"] % 2 else "I do not know."

    output = run_recipe("verified_traces", tasks, solve, "steps.difficulty=null", "outputs.tasks.of=right")

    assert {record["task"] for record in output.records("conversations")} == {task["environment"] for task in tasks}


def test_modes_come_in_pairs(run_recipe: Run) -> None:
    def solve(prompt: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        on = payload["chat_template_kwargs"]["enable_thinking"]
        wrong = "7" in prompt and not on
        answer = f"\\boxed{{{sum_of(prompt) + wrong}}}"
        return {"content": answer} | ({"reasoning_content": "hm"} if on else {})

    rows = [{"question": f"What is {number} + 1?", "answer": number + 1} for number in (1, 2, 7)]

    output = run_recipe("paired_modes", rows, solve)

    found = output.records("conversations")
    assert [record["thinking"] for record in found] == [True, False] * 2
    assert ["reasoning_content" in record["messages"][-1] for record in found] == [True, False] * 2
    assert not any("7" in record["messages"][0]["content"] for record in found)


def test_the_strong_answer_is_preferred_to_the_weak_one(run_recipe: Run, model: Model, tmp_path: Path) -> None:
    def strong(prompt: str, payload: Mapping[str, Any]) -> str:
        if "what the same user says next" in prompt:
            return "<message>And why is that?</message>"
        if "may have asked just before" in prompt:
            return "<message>What else is there?</message>"
        return f"A careful answer about {prompt.split()[-1]} with all that is to be said."

    def weak(prompt: str, payload: Mapping[str, Any]) -> str:
        return (
            "word " * 500 if "9" in prompt else f"No idea about {prompt.split()[-1]}, really none at all, ask others."
        )

    rows = [{"question": f"Tell me something new about matter number {number * 1111}"} for number in range(10)]

    output = run_recipe(
        "delta_pairs",
        rows,
        {"strong": model(strong, "big"), "weak": model(weak, "small")},
        "steps.task.columns.talk=id | chance(seed, 'talk') < 0.5",
        "steps.unique.near=null",
    )

    found = output.records("pairs")
    assert {(record["chosen_model"], record["rejected_model"]) for record in found} == {("big", "small")}
    assert all("careful" in record["chosen"]["content"] for record in found)
    assert {len(record["messages"]) for record in found} == {1, 3}
    turns = {(talk[0]["content"][:4], talk[-1]["content"][:4]) for talk in (record["messages"] for record in found)}
    assert turns == {("Tell", "Tell"), ("Tell", "And "), ("What", "Tell")}
    assert output.steps["differ"]["dropped"] == {"lengths differ": 1}
    from nemo_ext.data.preference.job import run as preference_data

    preference_data(
        compose(
            "preference_data",
            [f"sources={{mine: {{kind: pairs, path: {tmp_path}/out/pairs.jsonl}}}}", f"output={tmp_path}/pairs"],
        )
    )
    assert (tmp_path / "pairs" / "trl_train.jsonl").read_text()


def test_pools_are_judged_and_judges_too(
    model: Model, synthesize: Run, written: Written, records: Read, report: Any
) -> None:
    def judge(prompt: str, payload: Mapping[str, Any]) -> str:
        topic = re.search(r"matter (\d+)", prompt)
        good = topic is not None and prompt.count(topic[0]) == 2
        return f"<score>{9 if good and 'fine' in prompt else 2}</score>"

    teacher = model(lambda prompt, payload: f"A fine answer about {prompt}", "big")
    weak = model(lambda prompt, payload: f"Bad answer about {prompt}", "small")
    rows = [{"question": f"matter {number}"} for number in range(30)]
    words = [f"input={written(rows)}", f"roles.teacher.endpoint={teacher.url}", f"roles.weak.endpoint={weak.url}"]
    words += ["recipe=judged_pairs", "steps.unique.near=null"]

    code, output = synthesize(*words, f"roles.judge.endpoint={model(judge).url}")

    assert code == 0, output
    assert all(
        sorted(each["score"] for each in record["generations"]) == [2, 9, 9, 9]
        and next(each["model"] for each in record["generations"] if each["score"] == 2) == "small"
        for record in records("pairs")
    )
    assert len(records("pairs")) == 30
    numbers = report()["steps"]["score"]["numbers"]
    assert numbers["canaries"] >= 10 and numbers["canaries_fooled"] == 0

    yes = model(lambda prompt, payload: "<score>10</score>")
    code, output = synthesize(*words, f"roles.judge.endpoint={yes.url}", f"output={written([], 'x').parent / 'other'}")
    assert code == 1 and "planted faults, more than canaries.most" in output and "steps.score" in output


def test_questions_on_documents(run_recipe: Run) -> None:
    def teacher(prompt: str, payload: Mapping[str, Any]) -> str:
        name = re.search(r"town of (\w+)", prompt.rpartition("[Passage]")[2])
        if "[Passage]" in prompt:
            assert name
            question = f"In what year was the town of {name[1]} founded?"
            return f"<question>{question}</question><answer>{1000 + len(name[1])}</answer>"
        if "[Expected answer]" in prompt:
            expected, answer = (prompt.partition(f"[{part}]")[2].split()[0] for part in ("Expected answer", "Answer"))
            return f"<verdict>{'yes' if expected == answer else 'no'}</verdict>"
        town = re.search(r"the town of (\w+) founded", prompt)
        assert town
        return str(1000 + len(town[1]))

    texts = [
        f"The town of {'A' + 'b' * number} lies by a river. "
        + "It has many old houses and streets that wind about. " * 8
        for number in range(1, 9)
    ]

    output = run_recipe(
        "document_qa",
        [{"text": text} for text in texts],
        teacher,
        "steps.unique.text=[style, question] | tojson",
        "steps.unique.near=null",
        "steps.document.columns.words_wanted=400",
    )

    documents = output.records("documents")
    by_style = {
        style: [each for each in documents if each["style"] == style] for style in ("reasoning", "short", "long")
    }
    assert all(len(found) == 8 for found in by_style.values())
    assert all(each["text"].startswith("Question:") for each in by_style["reasoning"])
    assert all(each["text"].count("lies by a river") == 1 for each in by_style["short"])
    assert all(each["text"].count("lies by a river") > 2 for each in by_style["long"])
    tasks = output.records("tasks")
    assert len(tasks) == 8 and all(task["reference"]["answers"][0].isdigit() for task in tasks)


def test_questions_over_two_passages_need_both(run_recipe: Run) -> None:
    def teacher(prompt: str, payload: Mapping[str, Any]) -> str:
        if "[Expected answer]" in prompt:
            return "<verdict>yes</verdict>"
        ruler = re.search(r"[EH]\w+ rules", prompt)
        if "[Passage]" in prompt:
            assert ruler and prompt.index("by the river") < prompt.index("[Second passage]") < ruler.start()
            return f"<question>Who rules the town by the river?</question><answer>{ruler[0].split()[0]}</answer>"
        both = "by the river. " in prompt
        return f"It is {ruler[0]}" if ruler and (both or "Everybody" in ruler[0]) else "not given"

    texts = [
        "Town number one lies by the river. " * 250 + f"In town number one {who} rules. " * 290
        for who in ("Everybody", "Hilda")
    ]

    output = run_recipe(
        "document_qa",
        [{"text": text} for text in texts],
        teacher,
        "steps.style.rows=['long']",
        'steps.apart.columns.second="text[(text | length) // 2:] | piece(4096, seed, id)"',
        "steps.unique=null",
        "steps.judge.canaries=null",
    )

    assert [output.steps[step]["dropped"] for step in ("first", "second")] == [{}, {"one passage is enough": 1}]
    (found,) = (each["text"] for each in output.records("documents"))
    assert found.count("lies by the river") > 9 and found.count("Hilda rules") > 9


def test_texts_in_five_styles(run_recipe: Run) -> None:
    text = "The quick brown fox jumps over the lazy dog while the old farmer watches from his house by the road. " * 3

    def write(prompt: str, payload: Mapping[str, Any]) -> str:
        if "as connected prose" in prompt:
            return "<nothing>nothing</nothing>"
        if "shorter and clearer" in prompt:
            return f"<result>{text}</result>"
        if "Markdown" in prompt:
            return (
                "<result>Eine kurze Liste auf Deutsch, die sehr viele Worte enthält und die niemand "
                "hier haben wollte, weil der Text englisch ist.</result>"
            )
        return (
            "<result>Question: who jumps here, and over whom does he jump?\n\nAnswer: a fox "
            "jumps, and the dog lies under him.</result>"
        )

    output = run_recipe("rephrase", [{"text": text}], write)

    steps = output.steps
    assert steps["write"]["dropped"] == {"nothing to learn": 1, "a copy": 1}
    assert steps["screen"]["dropped"] == {"language/language-prompt": 1}
    assert steps["unique"]["dropped"] == {"duplicate": 1}
    assert [(each["style"], each["text"].startswith(text)) for each in output.records("documents")] == [
        ("questions", True)
    ]


def test_code_is_run(run_recipe: Run) -> None:
    row = {
        "id": "double",
        "code": "def double(x):\n    y = x\n    return y + x\n",
        "reference": {
            "language": "python",
            "style": "function",
            "function": "double",
            "tests": [{"args": [2], "expected": 4}],
        },
    }
    broken = {**row, "id": "broken", "code": f"{row['code']}# wrong\n"}

    def write(prompt: str, payload: Mapping[str, Any]) -> str:
        if "Explain the program" in prompt:
            return (
                "<explanation>A function `double` takes one number and returns a number that is twice "
                "as large as it, for all numbers.</explanation>"
            )
        if "in C++" in prompt:
            return f"```cpp\nlong twice(long x) {{ return {3 if '# wrong' in prompt else 2} * x; }}\n```"
        if "```cpp" in prompt:
            return f"```python\ndef double(x):\n    return {prompt.partition('return ')[2].partition(';')[0]}\n```"
        if "as it is explained" in prompt:
            return "```python\ndef double(number):\n    return number * 3\n```"
        return '```python\ndef double(number: float) -> float:\n    """Twice the number."""\n    return 2 * number\n```'

    output = run_recipe("rewrite_code", [row, broken], write, "steps.syntax=null", "steps.lint=null")

    assert output.steps["right"]["dropped"] == {"fails its tests": 3}
    found = {each["style"]: each["text"] for each in output.records("documents")}
    assert (
        sorted(found) == ["explain", "rewrite", "transpile"]
        and found["transpile"] == "long twice(long x) { return 2 * x; }\n"
    )
    prompt = [record["messages"][0]["content"] for record in output.records("conversations")]
    assert [text.partition("program")[0] for text in prompt] == ["Rewrite this ", "Write this "]


def test_rewritten_code_is_parsed_and_has_a_better_score(run_recipe: Run) -> None:
    pytest.importorskip("pylint")
    pytest.importorskip("tree_sitter_cpp")
    clean = '"""Twice."""\n\n\ndef twice(number):\n    """Twice the number."""\n    return 2 * number\n'
    poor = "print(unknown)\n"
    better = f'"""Poor."""\n{poor}'

    def write(prompt: str, payload: Mapping[str, Any]) -> str:
        if "in C++" in prompt:
            return f"```cpp\nlong twice(long x) {{ return 2 * x; {'' if 'import' in prompt else '}'}\n```"
        if "```cpp" in prompt:
            return f"```python\n{clean}\n```"
        if poor in prompt:
            return f"```python\n{poor if better in prompt else better}```"
        silent = "# pylint: disable=all\n" if "import sys" in prompt else ""
        return f"```python\n{silent}{clean.replace('2 *', '2 +  0 +')}```"

    sources = [clean, "import os\ndef twice(x):\n  return x + x\n", "import sys\ndef twice(x):\n  return x + x\n"]
    sources += [poor, better]  # scores far below 0
    output = run_recipe(
        "rewrite_code",
        [{"code": source} for source in sources],
        write,
        "steps.unique=null",
        "steps.style.rows=['rewrite', 'transpile']",
    )

    assert output.steps["syntax"]["dropped"] == {"no C++": 2}
    assert output.steps["lint"]["dropped"] == {"no better by Pylint": 1, "Pylint is silenced": 1}
    styles = ["rewrite", "transpile", "rewrite", "rewrite", "transpile", "transpile"]
    assert [record["style"] for record in output.records("documents")] == styles


def test_lines_are_translated_and_the_rest_is_unchanged(run_recipe: Run) -> None:
    german = {
        "Please look at ⟦0⟧ and tell me what you think about the weather.": (
            "Bitte schau dir ⟦0⟧ an und sag mir, was du über das Wetter denkst."
        ),
        "The answer is ⟦0⟧, as everybody knows who has been there.": (
            "Die Antwort ist ⟦0⟧, wie jeder weiß, der dort gewesen ist."
        ),
    }

    def translate(prompt: str, payload: Mapping[str, Any]) -> str:
        line = prompt.rpartition("\n")[2]
        if "lost" in line:
            return "<translation>Die Marke ist verloren gegangen, wie man leider sehen kann.</translation>"
        return f"<translation>{german[line]}</translation>"

    def chat(answer: str) -> dict[str, Any]:
        prompt = "Please look at https://example.org/a?b=1 and tell me what you think about the weather."
        return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}

    whole = (
        "  The answer is $x^2$, as everybody knows who has been there.\n\n```python\nprint('The code')\n```\n$$\ny\n$$"
    )
    rows = [chat(whole), chat("The mark of `this` is lost.")]

    output = run_recipe("translate", rows, translate, "steps.target.rows=[{'to': 'de', 'to_name': 'German'}]")

    (record,) = output.records("conversations")
    assert record["language"] == "de"
    assert (
        record["messages"][0]["content"]
        == "Bitte schau dir https://example.org/a?b=1 an und sag mir, was du über das Wetter denkst."
    )
    assert record["messages"][1]["content"] == whole.replace(
        "The answer is $x^2$, as everybody knows who has been there.",
        "Die Antwort ist $x^2$, wie jeder weiß, der dort gewesen ist.",
    )
    assert output.steps["translate"]["dropped"] == {"marks are lost": 1}
    assert output.steps["whole"]["dropped"] == {}
    assert output.steps["together"]["dropped"] == {"a message was not translated": 1}


def test_conversations_with_tools_end_in_the_right_database(run_recipe: Run, reply: Any) -> None:
    too_long = b'{"object": "error", "message": "This model\'s maximum context length is 4096 tokens.", "code": 400}'
    tasks = [task for task in generate("workplace", 12, seed=1) if not task.reference.get("answer")][:5]
    calls = {task.prompt[-1].content: solution_calls(task.reference) for task in tasks}

    def user(prompt: str, payload: Mapping[str, Any]) -> str:
        (wanted,) = (text for text in calls if text in payload["messages"][0]["content"])
        assert payload["messages"][-1]["role"] == "user"
        return f"Hello! {wanted}" if len(payload["messages"]) == 2 else "[done]"

    def agent(prompt: str, payload: Mapping[str, Any]) -> Any:
        messages = payload["messages"]
        assert payload["chat_template_kwargs"] == {"enable_thinking": False}
        first = next(message["content"] for message in messages if message["role"] == "user")
        done = sum(message["role"] == "tool" for message in messages)
        if not done and payload["seed"] % 3 == 0:
            return {"content": "It is done."}
        if done and payload["seed"] % 7 == 0:
            return reply(status=400, body=too_long)
        wanted = calls[first.removeprefix("Hello! ")]
        if done == len(wanted):
            return {"content": "It is done."}
        call = {
            "id": f"c{done}",
            "type": "function",
            "function": {"name": wanted[done].name, "arguments": json.dumps(wanted[done].arguments)},
        }
        return {"content": "", "tool_calls": [call]}

    output = run_recipe(
        "tool_trajectories",
        [task.record() | {"thinking": False} for task in tasks],
        {"teacher": agent, "user": user},
        "steps.talk.samples=8",
    )

    talked = output.steps["talk"]
    assert talked["made"] == 40 and not talked["dropped"]
    made = [json.loads(line) for line in (output.folder / "steps" / "talk" / "rows.jsonl").read_text().splitlines()]
    assert any(row["why"] == "an answer was truncated" and not row["correct"] for row in made)
    found = output.records("conversations")
    assert found and all(record["messages"][1]["content"].startswith("Hello! ") for record in found)
    assert all(record["messages"][-1]["content"] == "It is done." for record in found)
    assert all(task["environment"] == "workplace" and task["thinking"] is False for task in output.records("tasks"))


def test_solutions_compute_with_python(run_recipe: Run) -> None:
    def teacher(prompt: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        messages, wrong = payload["messages"], payload["seed"] % 3 == 0
        assert payload["tools"] == [TOOL.schema]
        outputs = [message["content"] for message in messages if message["role"] == "tool"]
        total = sum_of(messages[0]["content"])
        codes = [f"total = {total}", f"print(total + {int(wrong)})"]
        if total == 6 or len(outputs) == 2:
            return {"content": f"\\boxed{{{outputs[1] if outputs else total}}}", "reasoning_content": "done"}
        code = "1 / 0" if total == 7 else codes[len(outputs)]
        function = {"name": TOOL.name, "arguments": json.dumps({"code": code})}
        return {
            "content": "",
            "reasoning_content": "so",
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        }

    rows = [{"id": f"q{number}", "question": f"What is {number} + 5?", "answer": number + 5} for number in range(1, 6)]

    output = run_recipe("python_traces", rows, teacher)

    found = output.records("conversations")
    assert {record["id"].partition("/")[0] for record in found} == {"q3", "q4", "q5"}
    dropped = output.steps["right"]["dropped"]
    assert dropped["without a call"] == 8 and dropped["wrong"] > 0
    assert output.steps["fate"]["dropped"] == {"never solved": 8}, "the outputs of q2 are errors"
    sample = to_sample(found[0], id="q3")
    assert [message.role for message in sample.messages] == ["user", *["assistant", "tool"] * 2, "assistant"]
    assert sample.messages[-1].content == f"\\boxed{{{sample.messages[-2].content}}}"
    assert sample.messages[1].reasoning == "so" and sample.tools == (TOOL.schema,)
    assert {(task["environment"], len(task["tools"])) for task in output.records("tasks")} == {("python_tool", 1)}


def test_calls_of_tools_that_are_not_there_are_rejected(run_recipe: Run) -> None:
    def solve(prompt: str, payload: Mapping[str, Any]) -> str:
        wrong = payload["seed"] % 3
        if wrong == 2:
            return '<tool_call>{"name": "calculator", "arguments": {}}</tool_call>'
        return f"The answer is {sum_of(prompt) + wrong}."

    rows = [{"id": f"q{number}", "question": f"What is {number} + 5?", "answer": number + 5} for number in range(6)]

    output = run_recipe("tool_absent", rows, solve)

    generations = [record["generations"][0] for record in output.records("pairs")]
    texts = {each["message"]["content"]: each["correct"] for each in generations}
    assert any("tool_call" in text for text in texts) and not any(
        ok for text, ok in texts.items() if "tool_call" in text
    )
    assert {True, False} == set(texts.values())


def test_the_right_solution_is_selected(run_recipe: Run) -> None:
    def teacher(prompt: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        if "[Solution 1]" in prompt:
            solutions = re.findall(r"\[Solution (\d)\]\n(.*)", prompt)
            right = next(
                number
                for number, text in solutions
                if f"{{{sum_of(prompt.partition('[Problem]')[2].splitlines()[1])}}}" in text
            )
            return {
                "content": f"I compare. <best>{right if payload['seed'] % 7 else 4 if right != '4' else 1}</best>",
                "reasoning_content": "so",
            }
        return {"content": f"\\boxed{{{sum_of(prompt) + payload['seed'] % 3}}}"}

    rows = [{"id": f"q{number}", "question": f"What is {number} + 5?", "answer": number + 5} for number in range(10)]

    output = run_recipe("genselect", rows, teacher)

    found = output.records("conversations")
    assert found
    for record in found:
        best = re.search(r"<best>(\d)</best>", record["messages"][-1]["content"])
        assert best
        problem = record["messages"][0]["content"]
        chosen = re.findall(r"\[Solution \d\]\n(.*)", problem)[int(best[1]) - 1]
        assert f"{{{sum_of(problem.partition('[Problem]')[2].splitlines()[1])}}}" in chosen
    pairs = output.records("comparisons")
    assert len({pair["id"] for pair in pairs}) == len(pairs)


def test_harm_is_refused_and_harmlessness_is_not(run_recipe: Run) -> None:
    def anyone(prompt: str, payload: Mapping[str, Any]) -> str:
        system = payload["messages"][0]["content"] if payload["messages"][0]["role"] == "system" else ""
        if "in other clothes" in prompt:
            return f"<message>In a story, {prompt.rpartition(chr(10))[2]}</message>"
        if "[Message]" in prompt:
            return f"<harm>{'yes' if 'bad thing' in prompt else 'no'}</harm>"
        if "[Answer]" in prompt:
            answer = prompt.rpartition("[Answer]")[2]
            label = "refusal" if "cannot" in answer else "unsafe" if "bad thing" in answer else "safe"
            return f"<label>{label}</label>"
        if "could do harm" in system or "as if it were harmful" in system:
            return "I cannot help with that, as somebody could be hurt."
        return f"Of course, here is how: {prompt}"

    rows = [
        {"id": f"h{number}", "prompt": f"do the bad thing number {number * 777} today", "harmful": True}
        for number in range(3)
    ]
    rows += [{"id": "s", "prompt": "bake a cake for my friends tomorrow", "harmful": False}]

    output = run_recipe("safety", rows, anyone, "steps.unique.near=null")

    chats = output.records("conversations")
    assert len(chats) == 3 * 2 + 2  # three wrappings give the same message
    assert all(
        ("cannot" in chat["messages"][-1]["content"]) == ("bad" in chat["messages"][0]["content"]) for chat in chats
    )
    pairs = output.records("pairs")
    assert {(pair["prompt_label"], *(each["label"] for each in pair["generations"])) for pair in pairs} == {
        ("harmful", "safe", "unsafe"),
        ("safe", "safe", "refusal"),
    }


def test_prompts_evolve(run_recipe: Run) -> None:
    def anyone(prompt: str, payload: Mapping[str, Any]) -> str:
        if "Judge the task" in prompt:
            task = prompt.rpartition("[Task]")[2].strip()
            whole = task.endswith("?")
            return f"<clear>{5 if whole else 1}</clear><hard>4</hard><new>4</new>"
        task = prompt.rpartition("[Task]")[2].strip().partition("\n")[0]
        if "widen" in prompt or "seldom about" in prompt:
            return f"<task>{task}</task>"
        return (
            f"<task>Number {payload['seed']}: how would {payload['seed'] * 7} people of "
            f"{payload['seed'] % 99} lands solve this?</task>"
        )

    rows = [
        {"id": f"q{number}", "question": f"How many apples do {number} boys and {number * 3} girls eat?"}
        for number in range(8)
    ]

    output = run_recipe("evolve", rows, anyone, "steps.unique.near=null")

    assert output.steps["write"]["dropped"] == {"hardly new": 16}
    found = output.records("prompts")
    assert len(found) == 8 * 4
    assert {each["way"] for each in found} == {"deepen", "constrain", "obfuscate", "complicate"}
    assert output.steps["critic"]["numbers"]["canaries_fooled"] == 0


def test_two_tasks_are_of_different_domains(run_recipe: Run) -> None:
    def anyone(prompt: str, payload: Mapping[str, Any]) -> str:
        if "Judge the task" in prompt:
            return f"<clear>{5 if prompt.strip().endswith('?') else 1}</clear><hard>4</hard><new>4</new>"
        assert set(re.findall(r"code|physics", prompt.partition("[Task]")[2])) == {"code", "physics"}
        return f"<task>Number {payload['seed']}: how would {payload['seed'] * 7} people go about solving this?</task>"

    rows = [{"question": f"A task of code, number {number}?", "domain": "code"} for number in range(6)]
    rows.append({"question": "The one task of physics?", "domain": "physics"})

    output = run_recipe("evolve", rows, anyone, "steps.way.rows=['complicate']", "steps.unique.near=null")

    assert output.steps["best"]["made"] == 7


def test_every_recipe_is_on_the_page_and_in_the_help() -> None:
    root = FOLDER.parents[1]
    page, told = (root / "docs" / "synthetic.md").read_text(), (root / "hydra_conf" / "synthesize.yaml").read_text()

    for path in FOLDER.glob("*.yaml"):
        assert f"| `{path.stem}` |" in page and re.search(rf"\b{path.stem}[,;]", told), path.stem


def test_problems_of_a_forum_are_extracted_and_classified(run_recipe: Run) -> None:
    def anyone(prompt: str, payload: Mapping[str, Any]) -> str:
        if "[Discussion]" in prompt:
            return (
                f"<answer>{'unknown' if 'no idea' in prompt else sum_of(prompt.partition('[First post]')[0])}</answer>"
            )
        if "Classify" in prompt:
            problem = prompt.rpartition("[Problem]")[2]
            labels = {
                "proof": "Prove" in problem,
                "choice": "Choose" in problem,
                "binary": "Is it" in problem,
                "valid": "previous problem" not in problem,
            }
            return "".join(f"<{name}>{'yes' if holds else 'no'}</{name}>" for name, holds in labels.items())
        found = re.findall(
            r"(?:What|Prove|Choose|Is it|As in the previous problem)[^?]*\?", prompt.rpartition("[First post]")[2]
        )
        return "".join(f"<problem>{problem}</problem>" for problem in found) or "<none>none</none>"

    rows = [
        {"text": f"Hi! What is {number} and {number * 7} together?", "replies": ["Easy."]} for number in range(1, 6)
    ]
    rows += [
        {"text": "I like it here.", "replies": []},
        {"text": "Two: Prove that a + b = b + a? What is 90 plus 9 in all?"},
        {"text": "Choose the larger one of 3 and 4? Is it true that 5 is odd? As in the previous problem, find y?"},
        {"text": "What is 800 plus 8 exactly?", "replies": "no idea"},
    ]

    output = run_recipe("forum_problems", rows, anyone, "steps.unique.near=null")

    steps = output.steps
    assert steps["extract"]["dropped"] == {"no problem": 1}
    assert steps["classify"]["dropped"] == {"a proof": 1, "multiple choice": 1, "yes or no": 1, "invalid": 1}
    assert steps["classify"]["numbers"]["canaries"] > 5 and not steps["classify"]["numbers"]["canaries_fooled"]
    found = {record["question"]: record.get("answer") for record in output.records("prompts")}
    assert found == {f"What is {n} and {n * 7} together?": str(n * 8) for n in range(1, 6)} | {
        "What is 90 plus 9 in all?": None,
        "What is 800 plus 8 exactly?": None,
    }


def test_questions_on_topics_have_one_right_choice(
    model: Model, synthesize: Run, written: Written, records: Read, report: Any, tmp_path: Path
) -> None:
    def anyone(prompt: str, payload: Mapping[str, Any]) -> str:
        if "List twenty" in prompt:
            return "<subtopic>heat</subtopic><subtopic>light</subtopic>"
        subject = re.search(r"\b(heat|light|acids)\b", prompt)
        assert subject
        if "exactly one of its choices" in prompt:
            return f"<verdict>{'yes' if prompt.count(subject[0]) == 5 else 'no'}</verdict>"
        choices = [f"{subject[0]} {number}" for number in range(3 if payload["seed"] % 5 == 0 else 4)]
        question = f"Which value has it, as number {payload['seed']} says of {subject[0]}?"
        return f"<question>{question}</question>" + "".join(f"<choice>{choice}</choice>" for choice in choices)

    rows = [{"topic": "physics"}, {"topic": "chemistry", "subtopics": ["acids"]}]
    teacher = model(anyone)

    code, output = synthesize(
        "recipe=science_questions", f"input={written(rows)}", f"endpoint={teacher.url}", "steps.unique.near=null"
    )

    assert code == 0, output
    steps = report()["steps"]
    assert steps["write"]["dropped"]["not four to ten choices"] and not steps["check"]["dropped"]
    assert steps["check"]["numbers"]["canaries"] and not steps["check"]["numbers"]["canaries_fooled"]
    found = records("prompts")
    assert {record["version"] for record in found} == {"original", "variation"}
    assert {(record["domain"], record["subtopic"]) for record in found} == {
        ("physics", "heat"),
        ("physics", "light"),
        ("chemistry", "acids"),
    }
    assert all("D) " in record["question"] and "\\boxed{}" in record["question"] for record in found)

    solve = model(lambda prompt, payload: f"\\boxed{{{'B' if payload['seed'] % 16 else 'A'}}}")
    words = ["recipe=verified_traces", f"input={tmp_path}/out/prompts.jsonl", f"output={tmp_path}/solved"]
    code, output = synthesize(*words, f"endpoint={solve.url}")
    assert code == 0, output
    lines = (tmp_path / "solved" / "conversations.jsonl").read_text().splitlines()
    assert lines and all("{B}" in line for line in lines)


def test_answers_are_criticised_edited_and_selected(run_recipe: Run) -> None:
    def anyone(prompt: str, payload: Mapping[str, Any]) -> str:
        asked = re.search(r"matter \d+\b", prompt)
        assert asked
        if "[Answer 1]" in prompt:
            lengths = {
                number: len(text) * text.startswith(f"Edited {asked[0]} ")
                for number, text in re.findall(r"\[Answer (\d)\]\n(.*)", prompt)
            }
            return f"<best>{max(lengths, key=lambda number: lengths[number])}</best>"
        if "[Feedback]" in prompt:
            return f"<edited>Edited {asked[0]} {prompt.rpartition('[Feedback]')[2].strip()}</edited>"
        if "[Answer]" in prompt:
            return "more " * len(prompt.rpartition("[Answer]")[2].split())
        return f"A draft on {asked[0]}" + " and" * (payload["seed"] % 50)

    rows = [{"prompt": f"Explain matter {number} of ours."} for number in range(12)]

    output = run_recipe("feedback_edit", rows, anyone, "steps.unique.near=null")

    numbers = output.steps["select"]["numbers"]
    assert numbers["canaries"] > 5 and not numbers["canaries_fooled"]
    found = output.records("conversations")
    assert len(found) == 12
    for record in found:
        pools = [json.loads(line) for line in (output.folder / "steps" / "together" / "rows.jsonl").open()]
        (pool,) = (row["pool"] for row in pools if row["id"] == record["id"])
        assert record["messages"][1]["content"] == max(pool, key=len)


def test_a_reward_model_selects(run_recipe: Run) -> None:
    def score(prompt: str, payload: Mapping[str, Any]) -> str:
        question, answer = (message["content"] for message in payload["messages"])
        return f"reward:-{len(answer) % 9}.5" if question in answer else "reward:-55.25"

    def solve(prompt: str, payload: Mapping[str, Any]) -> str:
        return f"{'I digress' if payload['seed'] % 3 == 0 else prompt} {'.' * (payload['seed'] % 40)}"

    rows = [{"prompt": f"Explain matter {number * 111}"} for number in range(8)]

    output = run_recipe("rejection_sampling", rows, {"teacher": solve, "reward": score}, "steps.unique.near=null")

    step = output.steps["score"]
    assert step["dropped"]["reward below the lowest"] > 5 and not step["numbers"]["canaries_fooled"]
    found = output.records("conversations")
    assert len(found) == 8 and all(each["messages"][0]["content"] in each["messages"][1]["content"] for each in found)
    rows = [json.loads(line) for line in (output.folder / "steps" / "score" / "rows.jsonl").open()]
    for record in found:
        scores = [row["score"] for row in rows if row["id"].partition("/")[0] == record["id"].partition("/")[0]]
        assert record["reward"] == max(scores) and len(scores) > 1


def test_code_traces_are_post_processed(run_recipe: Run) -> None:
    tests = [{"args": [2], "expected": 4}]
    row = {
        "environment": "code",
        "prompt": "Write double(x).",
        "reference": {"language": "python", "style": "function", "function": "double", "tests": tests},
    }

    def solve(prompt: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        trace = ["I add it.", "```python\nx + x\n```", None][payload["seed"] % 3]
        return {
            "content": f"```python\ndef double(x):\n    return x * {payload['seed'] % 2 + 1}\n```",
            "reasoning_content": trace,
        }

    output = run_recipe("code_traces", [row], solve, "steps.solve.samples=24")

    assert set(output.steps["lengths"]["dropped"]) <= {"no trace", "code in the trace"}
    assert {record["messages"][1]["reasoning_content"] for record in output.records("conversations")} == {"I add it."}


def test_pages_articles_and_mathematics_are_revised(run_recipe: Run) -> None:
    body = (
        "It is a long text on it, with many words that a reader would like to keep for later use, and so on it goes. "
    )

    def anyone(prompt: str, payload: Mapping[str, Any]) -> str:
        if "level of education" in prompt:
            return f"<level>{2 if 'fractions' in prompt else 5}</level>"
        subject = re.findall(r"subject\d+", prompt)
        if "[Revision]" in prompt:
            return f"<verdict>{'yes' if len(set(subject)) == 1 else 'no'}</verdict>"
        code = {"keeps": "print(1)", "invents": "print(2)"}.get(prompt.split()[-1], "")
        return f"<result>About {subject[0]}: {body * 2}{code and f'\n```python\n{code}\n```'}</result>"

    rows = [
        {"style": "code_page", "text": f"subject0 {body * 2}\nprint(1)\nkeeps"},
        {"style": "code_page", "text": f"subject1 {body * 2}\nprint(1)\ninvents"},
        {"style": "encyclopedia", "text": f"subject2 {body * 2}\n== References ==\nsubject99\n== Life ==\nLong."},
        {"style": "encyclopedia", "text": f"subject3 may refer to: {body * 2}"},
        {"style": "textbook", "text": f"subject4 {body * 2} fractions"},
        {"style": "textbook", "text": f"subject5 {body * 2} manifolds"},
        {"text": f"subject6 {body * 2}"},
    ]

    output = run_recipe("revise", rows, anyone, "steps.unique.near=null")

    steps = output.steps
    assert steps["page"]["dropped"] == {"no known style": 1, "a disambiguation page": 1}
    assert steps["level"]["dropped"] == {"below undergraduate level": 1}
    assert steps["write"]["dropped"] == {"code that is not on the page": 1}
    assert steps["judge"]["numbers"]["canaries"] and not steps["judge"]["numbers"]["canaries_fooled"]
    assert [re.findall(r"subject\d+", record["text"]) for record in output.records("documents")] == [
        ["subject0"],
        ["subject2"],
        ["subject5"],
    ]


def test_scientific_code_has_all_its_parts(run_recipe: Run) -> None:
    def anyone(prompt: str, payload: Mapping[str, Any]) -> str:
        subjects = re.findall(r"subject\d+", prompt)
        if "Judge by three" in prompt:
            return f"<verdict>{'yes' if len(set(subjects)) == 1 else 'no'}</verdict>"
        if "Write a thorough article" in prompt:
            code = "def f(:" if "subject2" in subjects else "def f(x):\n    return x"
            return f"<article>On {subjects[0]}: {'word ' * 120}\n\n```python\n{code}\n```\n</article>"
        step = {
            "description": f"Part of {subjects[0]}.",
            "signature": "def part(x: float) -> float:",
            "docstring": "A part.",
            "body": "y = x\nif y:\n    y += 1",
            "return": "return y",
        }
        steps = [step] * (4 if "subject0" in subjects else 5)
        if "subject1" in subjects:
            steps = [*steps[1:], {**step, "docstring": ""}]
        if "subject4" in subjects:
            steps = [*steps[1:], {**step, "body": ["y = x"]}]
        dependencies = {"numpy": "np"} if "subject5" in subjects else ["import numpy as np"]
        problem = {"problem": f"Compute {subjects[0]}.", "dependencies": dependencies, "steps": steps}
        return f"```json\n{json.dumps(problem)}\n```"

    texts = [f"This is about subject{number}. " + "It is known well and used widely. " * 8 for number in range(6)]

    output = run_recipe("science_code", [{"text": text} for text in texts], anyone, "steps.unique.near=null")

    steps = output.steps
    reasons = {"not 5 to 15 substeps": 1, "a component is missing": 2, "no list of dependencies": 1}
    assert steps["write"]["dropped"] == reasons
    assert steps["parses"]["dropped"] == {"no Python": 1}
    assert steps["judge"]["numbers"]["canaries"] and not steps["judge"]["numbers"]["canaries_fooled"]
    documents = [record["text"] for record in output.records("documents") if record["style"] == "problem"]
    assert len(documents) == 2 and all("        y += 1\n    return y" in text for text in documents)


def test_dialogues_are_about_their_code(run_recipe: Run) -> None:
    def anyone(prompt: str, payload: Mapping[str, Any]) -> str:
        names = re.findall(r"function\d+", prompt)
        if "[Conversation]" in prompt:
            return f"<verdict>{'yes' if len(set(names)) == 1 else 'no'}</verdict>"
        count = 3 if "function3" in names else 4
        return "".join(f"<message>On {names[0]}, part {number}.</message>" for number in range(count))

    rows = [{"code": f"def function{number}(x):\n" + "    x += 1  # one more\n" * 9} for number in range(4)]
    rows.append({"code": f"int function9(int x) {{ {'x += 1; ' * 30} return x; }}", "language": "cpp"})

    output = run_recipe("code_dialogues", rows, anyone, "steps.unique.near=null")

    steps = output.steps
    assert steps["write"]["dropped"] == {"no dialogue": 3}
    assert steps["judge"]["numbers"]["canaries"] > 3 and not steps["judge"]["numbers"]["canaries_fooled"]
    found = output.records("documents")
    assert len(found) == 3 * 3 + 2
    lesson = next(each["text"] for each in found if each["style"] == "lesson")
    assert re.findall(r"^\w+(?=: )", lesson, re.MULTILINE) == ["Student", "Teacher"] * 2


def test_scientific_texts_are_selected_and_their_topics_take_turns(run_recipe: Run) -> None:
    def label(prompt: str, payload: Mapping[str, Any]) -> str:
        text = prompt.rpartition("[Text]")[2]
        code = re.search(r"class (\d+)", text)
        labels = {
            "level": "high school" if "fractions" in text else "graduate",
            "artifacts": "yes" if "Buy now" in text else "no",
            "depth": "advanced",
            "correctness": "high",
            "process": "remember" if "dates" in text else "Analyze",
            "knowledge": "conceptual",
            "code": code[1] if code else "none",
        }
        return "".join(f"<{name}>{value}</{name}>" for name, value in labels.items())

    more = " This is what the text says of it, in words that are English and which are read by many people." * 12
    topics = ["class 530", "class 530", "class 536", "class 510", "class 5", "class 536 fractions", "class 900 dates"]
    rows = [{"text": f"Number {number}: {topic}.{more}"} for number, topic in enumerate(topics)] + [{"text": "short"}]

    output = run_recipe("stem_documents", rows, label, "steps.unique.near=null", "steps.spread.most=3")

    steps = output.steps
    assert steps["select"]["dropped"] == {
        "no class": 1,
        "below undergraduate level": 1,
        "no higher cognitive process": 1,
    }
    assert steps["label"]["numbers"]["canaries"] and not steps["label"]["numbers"]["canaries_fooled"]
    assert [record["code"] for record in output.records("documents")] == ["530", "510", "536"]
    assert steps["spread"]["dropped"] == {"more than most": 1}


def test_questions_of_benchmarks_are_found_by_embeddings_and_a_model(
    model: Model, synthesize: Run, written: Written, records: Read, report: Any, reply: Any
) -> None:
    def embed(prompt: str, payload: Mapping[str, Any]) -> Any:
        numbers = [float(number) for number in re.findall(r"\d+", payload["input"])]
        return reply(
            body=json.dumps({"data": [{"embedding": [1.0, *numbers]}], "usage": {"prompt_tokens": 3}}).encode()
        )

    def judge(prompt: str, payload: Mapping[str, Any]) -> str:
        question, *items = (re.findall(r"\d+", part)[-2:] for part in re.split(r"\[(?:Question|Item \d)\]", prompt)[1:])
        assert len(items) == 2
        return f"<same>{'yes' if question in items else 'no'}</same>"

    embedder = model(embed)
    endpoint_reply = embedder.reply
    embedder.reply = lambda payload: endpoint_reply({**payload, "prompt": payload["input"]})
    questions = [{"question": f"What is {n} and {n + 3}?", "answer": 2 * n + 3, "domain": "sums"} for n in range(1, 8)]
    items = [{"prompt": f"Add {n} to {n + 3}, please.", "benchmark": "sums"} for n in (2, 5, 20, 30, 40)]

    code, output = synthesize(
        "recipe=decontaminate",
        f"input=[{written(questions)},{written(items, 'items.jsonl')}]",
        f"roles.embedder.endpoint={embedder.url}",
        f"roles.judge.endpoint={model(judge).url}",
        "steps.near.count=2",
    )

    assert code == 0, output
    steps = report()["steps"]
    assert steps["compare"]["dropped"] == {"in a benchmark": 2}
    assert steps["compare"]["numbers"]["canaries"] > 3 and not steps["compare"]["numbers"]["canaries_fooled"]
    assert [record["answer"] for record in records("prompts")] == [2 * n + 3 for n in (1, 3, 4, 6, 7)]
    assert all(record["domain"] == "sums" and "prompt" not in record for record in records("prompts"))


def test_a_chat_continues_over_several_turns_and_other_answers_are_found(run_recipe: Run) -> None:
    def anyone(prompt: str, payload: Mapping[str, Any]) -> str:
        asked = re.findall(r"matter (\d+)", prompt)
        if "[Last answer]" in prompt:
            return f"<verdict>{'yes' if asked[-1] == asked[0] else 'no'}</verdict>"
        if "what the same user says next" in prompt:
            turn = prompt.count("[assistant]")
            return f"<message>More of matter {asked[0]}, {turn}</message>"
        return f"matter {asked[-1] if asked[-1] != '5' else 6} is this" if asked else "What?"

    rows: list[dict[str, Any]] = [{"id": f"q{number}", "question": f"Explain matter {number}"} for number in range(24)]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
    ]
    wrong = [{"prompt": turns}, {"prompt": ""}, {"prompt": ["Hello."]}, {"prompt": 5}]

    output = run_recipe(
        "multi_turn_chat",
        rows + [{"id": f"w{n}", **row} for n, row in enumerate(wrong)],
        anyone,
        "steps.unique.near=null",
    )

    steps = output.steps
    assert steps["texts"]["dropped"] == {"a message without text": 2, "no prompt": 1, "unreadable row": 1}
    assert steps["judge"]["dropped"] == {"does not answer": 1}, "of matter 5"
    assert steps["judge"]["numbers"]["canaries"] > 10 and not steps["judge"]["numbers"]["canaries_fooled"]
    found = {record["id"]: record for record in output.records("conversations")}
    assert {len(record["messages"]) // 2 for record in found.values()} == {1, 2, 3, 4}
    for name, record in found.items():
        roles = [message["role"] for message in record["messages"]]
        assert roles == ["user", "assistant"] * record["turns"]
        assert all(f"matter {name[1:]}" in message["content"].lower() for message in record["messages"][:1])


def test_personas_write_instructions_that_are_verified_in_every_turn(run_recipe: Run) -> None:
    def anyone(prompt: str, payload: Mapping[str, Any]) -> str:
        if "[Answer]" in prompt:
            person, answer = re.findall(r"person (\d+)", prompt)[-1], prompt.rpartition("[Answer]")[2]
            return f"<verdict>{'useful' if f'of {person} ' in answer else 'trivial'}</verdict>"
        if "You are this person" in prompt:
            person, word = re.findall(r"person (\d+)", prompt)[0], re.findall(r'the word "(\w+)"', prompt)[-1]
            return f'<message>I am person {person} and need help. Use the word "{word}" once or more.</message>'
        person, word = re.findall(r"person (\d+)", prompt)[0], re.findall(r'the word "(\w+)"', prompt)[-1]
        first = len(payload["messages"]) == 1
        if person == "3" and not first:
            return f"This is for the help of {person} without it."
        return f"The {word} is here." if person == "4" else f"This is for the help of {person} with the {word}."

    words = ("lantern", "bridge", "copper", "meadow")
    rules = [
        {
            "id": word,
            "rules": f'1. Use the word "{word}".',
            "reference": {"instructions": [{"id": "keywords:existence", "kwargs": {"keywords": [word]}}]},
        }
        for word in words
    ]
    people: list[dict[str, Any]] = [{"id": f"p{number}", "persona": f"person {number}"} for number in range(24)]

    wrong: list[dict[str, Any]] = [
        {"key": 1, "prompt": "Write a poem without commas.", "instruction_id_list": ["punctuation:no_comma"]},
        {"rules": "1. Be brief."},
        {"prompt": [{"role": "user", "content": None}]},
    ]

    output = run_recipe(
        "persona_instructions",
        people + rules + [{"id": f"w{n}", **row} for n, row in enumerate(wrong)],
        anyone,
        "steps.unique.near=null",
        "steps.task.columns.turns=2 if id == 'p3' else 1 | within(3, seed, id, 'turns')",
    )

    steps = output.steps
    assert steps["task"]["dropped"] == {"unreadable row": 1}
    assert steps["usable"]["dropped"] == {"neither a persona nor instructions": 2}
    assert steps["personas"]["dropped"] == {"a row of instructions": 4}
    assert (steps["right1"]["dropped"], steps["right2"]["dropped"]) == ({}, {"not followed": 1})
    assert steps["judge"]["dropped"] == {"trivial": 1}
    assert steps["judge"]["numbers"]["canaries"] > 10 and not steps["judge"]["numbers"]["canaries_fooled"]
    found = output.records("conversations")
    assert {record["id"] for record in found} == {f"p{number}" for number in range(24)} - {"p3", "p4"}
    assert {len(record["messages"]) // 2 for record in found} == {1, 2, 3}
    for record in found:
        asked = [re.findall(r'"(\w+)"', message["content"])[0] for message in record["messages"][::2]]
        assert len({*asked}) == len(asked), "every turn has instructions of its own"
    assert len(output.records("tasks")) == 22


LEAN = (
    'text=$(cat Main.lean); case "$text" in *mistake*) echo Main.lean:3: unknown identifier mistake; exit 1 ;; '
    '*"by sorry") echo warning: sorry ;; *"by rfl") ;; *) echo Main.lean:3: unsolved goals; exit 1 ;; esac'
)
"""Stand-in for Lean: accepts statements without a mistake, and proofs by rfl."""


def test_theorems_are_formalised_and_proved_until_the_checker_accepts_them(run_recipe: Run) -> None:
    def anyone(prompt: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        number = int(re.findall(r"t(\d+)", prompt)[0])
        header = "import Mathlib\n\n"
        if "[Theorem 2]" in prompt:
            return {"content": f"<verdict>{'yes' if len({*re.findall(r't\d+', prompt)}) == 1 else 'no'}</verdict>"}
        if "in natural language what" in prompt:
            return {"content": f"It is the claim t{99 if number == 3 else number}."}
        if "Prove the theorem" not in prompt:  # t2 is never formalised, t1 in the second attempt
            wrong = number == 2 or (number == 1 and "[Lean]" not in prompt)
            claim = "mistake" if wrong else f"{number} = {number}"
            header += "#eval 1\n\n" if number == 9 else "/-- An external claim. -/\n"
            return {"content": f"```lean\n{header}theorem t{number} : {claim} := by sorry\n```"}
        statement = f"theorem t{number} : {number} = {number} := by "
        rounds = prompt.count("[Lean]") and 1
        comment = "/-- An external claim. -/\n" if number != 8 else "def m (h : #s = 1) : IO Unit := pure ()\n"
        proof = {4: "sorry", 5: "nlinarith", 6: "rfl" if rounds and "unsolved goals" in prompt else "simp"}.get(
            number, "rfl"
        )
        if number == 7 and payload["seed"] % 2:
            statement = f"/- {statement}-/ theorem u : True := by "
        return {"content": f"```lean\n{header}{comment}{statement}{proof}\n```", "reasoning_content": "I think."}

    rows = [{"id": f"q{number}", "question": f"the claim t{number}"} for number in (*range(8), 9)]
    statement = "import Mathlib\n\ndef m (h : #s = 1) : IO Unit := pure ()\ntheorem t8 : 8 = 8 := by sorry"
    rows += [{"id": "q8", "statement": statement}, {"id": "formal", "statement": statement, "question": "t8"}]

    output = run_recipe(
        "lean_proofs",
        rows,
        anyone,
        f"steps.check.settings.command={json.dumps(['bash', '-c', LEAN])}",
        "steps.prove.samples=2",
        *(f"steps.{kind}{number}=null" for kind in ("fix", "proof") for number in range(3, 9)),
    )

    steps = output.steps
    assert steps["compiles"]["dropped"] == {"does not compile": 1, "an excluded word": 1}, "t2, t9"
    assert steps["judge"]["dropped"] == {"states something else": 1}, "t3"
    assert steps["judge"]["numbers"]["canaries"] and not steps["judge"]["numbers"]["canaries_fooled"]
    assert steps["unique"]["dropped"] == {"duplicate": 1}, "t8"
    found = output.records("conversations")
    rounds = {(record["id"].partition("/")[0], record["rounds"]) for record in found}
    assert {("q0", 0), ("q1", 0), ("q6", 1), ("q8", 0)} <= rounds
    assert {name for name, _ in rounds}.isdisjoint({"q4", "q5"})
    assert all(record["messages"][1]["content"].endswith("by rfl\n```") for record in found)
    for task in output.records("tasks"):
        start, excludes = task["reference"]["start"], task["reference"]["excludes"]
        assert start.endswith(":= by ") and "sorry" in excludes and not any(word in start for word in excludes)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("-- sorry\nexact external", []),
        ("/- a /- b -/ sorry -/ simp -- extern", []),
        ("-- /-\nsorry\n-- -/", ["sorry"]),
        ("/-- a --/ sorry", ["sorry"]),
        ('exact "/-" sorry "-/"', ["sorry"]),
        ("```lean4\n#eval! x\n```", ["#eval"]),
        ("exact notation", []),
        ("exact notation notation", ["notation"]),
    ],
)
def test_excluded_words_of_lean_are_whole_words_outside_comments(source: str, words: list[str]) -> None:
    assert lean_excluded(source, ["sorry", "extern", "#eval", "notation"], "theorem notation : True := by") == words


def test_tasks_in_a_shell_are_verified_by_their_tests(run_recipe: Run) -> None:
    def agent(prompt: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        messages = payload["messages"]
        outputs = [message["content"] for message in messages if message["role"] == "tool"]
        asked = messages[0]["content"]
        wrong = payload["seed"] % 3 == 0
        if "question.txt" in asked:
            commands = [
                "cat task/question.txt",
                f"echo {sum_of(outputs[0]) + wrong if outputs else ''} > task/answer.txt",
            ]
        elif "prices" in asked:
            commands = [f"awk -F, '{{s += $2}} END {{print s}}' prices.csv > {'other' if wrong else 'total'}.txt"]
        else:
            commands = []
        if len(outputs) == len(commands):
            return {"content": "Done."}
        function = {"name": "bash", "arguments": json.dumps({"command": commands[len(outputs)]})}
        return {"content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}

    files = {"prices.csv": "apple,3\npear,4\n"}
    rows: list[dict[str, Any]] = [
        {"id": f"q{number}", "question": f"What is {number} + 5?", "answer": number + 5} for number in (1, 2)
    ]
    rows.append(
        {
            "id": "sum",
            "question": "Write the sum of prices to total.txt.",
            "files": files,
            "test": "grep -qx 7 total.txt",
        }
    )
    rows.append({"id": "math", "environment": "math", "prompt": "What is 4 + 5?", "reference": {"answer": "9"}})
    rows.append({"id": "idle", "question": "Do nothing.", "test": "true"})
    rows.append({"id": "hard", "question": "Do what you cannot.", "test": "false"})
    rows.append({"id": "open", "question": "What do you think?"})
    rows.append({"id": "image", "question": "Do nothing.", "test": "true", "image": "debian"})
    rows.append({"id": "empty", "question": "What is nothing?", "answer": " "})

    output = run_recipe("terminal_traces", rows, agent)

    steps = output.steps
    assert steps["testable"]["dropped"] == {"without a test or an answer": 2, "with an image": 1}
    assert steps["fate"]["dropped"] == {"never solved": 4}
    assert steps["right"]["dropped"]["without a call"] == 4
    found = output.records("conversations")
    assert {record["id"].partition("/")[0] for record in found} == {"q1", "q2", "math", "sum"}
    assert all(record["tools"][0]["function"]["name"] == "bash" for record in found)
    assert {task["environment"] for task in output.records("tasks")} <= {"terminal"}


def test_questions_that_require_five_documents_fail_without_any_of_them(run_recipe: Run) -> None:
    """The answer is the sum of what five documents say; q2's question can be answered without its last document."""

    def anyone(prompt: str, payload: Mapping[str, Any]) -> str:
        stated = dict(re.findall(r"The mill (\d+) ground (\d+) sacks", prompt))
        if "[[correct]]" in prompt:
            expected, answer = (
                re.findall(rf"BEGIN [^\n]*{name}[^\n]*\n(.*?)\nEND", prompt, re.DOTALL)[0].split()[-1]
                for name in ("reference answer", "candidate's answer")
            )
            return f"[[{'correct' if expected == answer else 'incorrect'}]]"
        if "[Document 1]" in prompt:
            mills = list(stated)[: 4 if "mill 3 " in prompt.partition("[Document 2]")[0] else 5]
            uses = ", ".join(str(number + 1) for number in range(len(mills)))
            total = sum(int(stated[mill]) for mill in mills)
            question = f"How many sacks did mills {' and '.join(mills)} grind together?"
            return f"<question>{question}</question><answer>{total}</answer><uses>{uses}</uses>"
        mills = re.findall(r"\d+", prompt.rpartition("How many sacks")[2].partition("grind")[0])
        missing = [mill for mill in mills if mill not in stated]
        if missing and "2" not in mills[:1]:
            return "They do not suffice: nothing"
        return str(sum(100 + int(mill) for mill in mills))

    rows = [{"id": f"q{n}", "text": f"The mill {n} ground {100 + n} sacks. It stands by the river."} for n in range(12)]
    wrong: list[dict[str, Any]] = [
        {"documents": [{"title": "A", "text": "The mill 3 ground 103 sacks."}] * 5},
        {"documents": [["A", ["One sentence."]]] * 5},
        {"documents": "one text"},
        {"documents": {"title": ["A"], "sentences": [["One sentence."]]}},
        {"text": None},
        {"documents": 5},
    ]

    output = run_recipe(
        "multi_document_qa",
        rows + [{"id": f"w{n}", **row} for n, row in enumerate(wrong)],
        anyone,
        "steps.unique.near=null",
    )

    steps = output.steps
    assert steps["texts"]["dropped"] == {"documents are not texts": 4, "no text": 1, "unreadable row": 1}
    assert steps["ask"]["dropped"] == {"fewer than five documents": 1}, "q3"
    assert steps["needed"]["dropped"]["answered without one of them"] == 1, "q2"
    assert steps["check"]["numbers"]["canaries"] > 10 and not steps["check"]["numbers"]["canaries_fooled"]
    tasks = output.records("tasks")
    assert {task["id"].partition("/")[0] for task in tasks} == {row["id"] for row in rows} - {"q2", "q3"}
    for task in tasks:
        mills = re.findall(r"\d+", task["reference"]["question"])
        assert len(mills) == 5 and task["reference"]["answer"] == str(sum(100 + int(mill) for mill in mills))
        assert all(f"mill {mill} ground" in task["prompt"] for mill in mills)


def test_schemas_with_documents_are_limited_and_satisfied(run_recipe: Run) -> None:
    def anyone(prompt: str, payload: Mapping[str, Any]) -> str:
        topic = re.findall(r"topic(\d)", prompt)
        if "<verdict>yes</verdict>" in prompt:
            return f"<verdict>{'yes' if len({*topic}) == 1 else 'no'}</verdict>"
        if "a JSON schema for" in prompt:
            properties: dict[str, Any] = {f"topic{topic[0]}": {"type": "string"}, "year": {"type": "integer"}}
            if topic[0] in "456":  # an unknown type, another document, an endless loop
                properties["year"] = {"4": {"type": "int"}, "5": {"$ref": "https://a.b/c"}}.get(
                    topic[0], {"type": "string", "allOf": [{"$ref": "#/properties/one/properties/year"}]}
                )
            if topic[0] == "1":  # too simple for levels 2 and 3
                schema: dict[str, Any] = {"type": "object", "properties": properties}
            else:
                inner = {"type": "object", "properties": properties, "required": ["year"]}
                schema = {"type": "object", "properties": {"one": inner, "two": inner}, "required": ["one", "two"]}
            if topic[0] == "2":
                schema["properties"]["one"] = {"type": "integer", "minimum": 9, "maximum": 1}  # cannot be satisfied
                schema["properties"]["more"] = {"type": "object", "properties": properties}
            text = f"A report on topic{topic[0]}. " + "It was written in the year 1900 by the town. " * 6
            return f"<document>{text}{payload['seed']}</document>\n```json\n{json.dumps(schema)}\n```"
        value = {"one": {"year": 1900}, "two": {"year": 1900 if payload["seed"] % 2 else "1900"}}
        return json.dumps(value if topic[0] != "1" else {"year": 1900})

    rows = [{"id": f"q{number}", "topic": f"topic{number}"} for number in range(7)]

    output = run_recipe("json_schemas", rows, anyone, "steps.unique.near=null")

    steps = output.steps
    assert steps["write"]["dropped"] == {"too simple": 4, "invalid schema": 18}
    assert steps["rate"]["dropped"]["never valid"] > 0
    assert steps["judge"]["numbers"]["canaries"] > 5 and not steps["judge"]["numbers"]["canaries_fooled"]
    found = output.records("conversations")
    assert {record["id"].partition("/")[0] for record in found} == {"q0", "q1", "q3"}
    for record in found:
        asked, answer = (message["content"] for message in record["messages"])
        assert "1900" in asked and '"properties"' in asked and '"1900"' not in answer
    assert all("one" in task["reference"]["schema"]["properties"] for task in output.records("tasks")), (
        "q1 is always valid"
    )


def test_retrieved_passages_become_questions_with_choices_and_open_ones(
    run_recipe: Run, model: Model, reply: Any
) -> None:
    def embed(payload: Mapping[str, Any]) -> Any:
        matter = ["heat", "light", "cells"]
        vector = [float(word in payload["input"]) for word in matter] + [0.01]
        return reply(body=json.dumps({"data": [{"embedding": vector}], "usage": {"prompt_tokens": 3}}).encode())

    def anyone(prompt: str, payload: Mapping[str, Any]) -> str:
        numbers = re.findall(r"law (\d+)", prompt)
        if "[Answer]" in prompt:
            wrong = prompt.rpartition("[Answer]")[2].split()[-1] != f"v{numbers[0]}"
            return f"<verdict>{'no' if wrong or len({*numbers}) > 1 else 'yes'}</verdict>"
        if "in other words" in prompt:
            text = prompt.rpartition("</question>.")[2].strip()
            return f"<question>{text if numbers[0] == '1' else f'Tell me: {text}'}</question>"
        if "[Right]" in prompt:
            lead = "Which of the following is" if numbers[0] == "2" else "What is"
            return f"<question>{lead} the value of law {numbers[0]}?</question><answer>v{numbers[0]}</answer>"
        right = "v9" if numbers[0] == "3" else f"v{numbers[0]}"  # the answer to law 3 is wrong
        choices = "".join(f"<choice>{value}</choice>" for value in ("x", "y", right, "z"))
        return f"<question>Which value has law {numbers[0]} here?</question>{choices}<right>{right}</right>"

    embedder = model(anyone)
    embedder.reply = embed
    matter = ("heat", "heat", "light", "light", "heat", "cells")
    rows: list[dict[str, Any]] = [
        {"id": f"p{number}", "text": f"Of {word}: law {number} has the value v{number}."}
        for number, word in enumerate(matter)
    ]
    rows += [{"id": "a", "query": "laws of heat"}, {"id": "b", "query": "laws of light and heat"}]

    output = run_recipe("science_retrieval", rows, {"": anyone, "embedder": embedder})

    steps = output.steps
    assert steps["queries"]["dropped"] == {"a passage": 6}
    assert steps["similar"]["dropped"] == {"not similar": 4}, "heat and light: 3, 3, 2 and 2 of 6, cells: none"
    assert steps["once"]["dropped"] == {"duplicate": 3}
    assert steps["open"]["dropped"] == {"asks for a choice": 1}
    assert steps["paraphrase"]["dropped"] == {"a copy": 2}
    assert steps["judge"]["dropped"]["not answered by the passage"] >= 2, "law 3"
    assert steps["judge"]["numbers"]["canaries"] and not steps["judge"]["numbers"]["canaries_fooled"]
    prompts = output.records("prompts")
    assert {re.findall(r"law (\d)", record["question"])[0] for record in prompts} == {"0", "1", "2", "4"}
    for record, task in zip(prompts, output.records("tasks"), strict=True):
        number = re.findall(r"law (\d)", record["question"])[0]
        assert (
            f"\n{record['answer']}) v{number}" in record["question"] and task["reference"]["answer"] == record["answer"]
        )
    assert {record["reference"]["answer"] for record in output.records("open")} == {"v0", "v1", "v3", "v4"}
