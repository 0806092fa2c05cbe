"""Conversion of tasks into NeMo Gym's data rows, and of rows (ours or Gym's own) into tasks.

A row is {responses_create_params: {input, tools, ...}, verifier_metadata: {id, environment, domain, reference,
thinking}}, in which the prompt is OpenAI's Responses input. Rows of the following Gym servers have an equivalent
environment here and can be read: math_with_judge, ns_tools, mcqa, instruction_following, structured_outputs, code_gen,
xlam_fc, single_step_tool_use_with_argument_comparison and multichallenge.
"""

import json
from collections.abc import Callable, Mapping
from string import ascii_uppercase
from typing import Any

from nemo_ext.chat.formats import normal_messages
from nemo_ext.chat.sample import Message, Role
from nemo_ext.chat.tool_calls import check_tools, read_openai_calls
from nemo_ext.job.settings import check_keys, nearest
from nemo_ext.rl.task import Task

SERVER = "nemo_ext"
"""Prefix of our servers' names in Gym, and the name of their folder."""
PARAMETERS, METADATA = "responses_create_params", "verifier_metadata"
ARGUMENTS, THINKING = "chat_template_kwargs", "enable_thinking"
"""Key of a request's metadata whose JSON Gym's vllm_model passes to the chat template, and the variable of the mode."""
SETTINGS: Mapping[str, Mapping[str, Any]] = {"code": {"max_tests": 1000}}
"""Settings of environments whose defaults differ in Gym, because its code tasks have up to several hundred tests."""
_KEYS = ("id", "environment", "domain", "reference", "thinking")
_ROLES: Mapping[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def to_gym(task: Task, *, thinking_key: str = THINKING) -> dict[str, Any]:
    """Convert a task into a row.

    Args:
        thinking_key: variable in the model's chat template that switches reasoning on and off; Gym's vllm_model passes
            it on for tasks with a thinking mode.
    """
    parameters: dict[str, Any] = {"input": [item for message in task.prompt for item in _items(message)]}
    if task.tools:
        parameters["tools"] = [{"type": "function", "strict": False, **tool["function"]} for tool in task.tools]
    if task.thinking is not None:
        parameters["metadata"] = {ARGUMENTS: json.dumps({thinking_key: task.thinking})}
    metadata: dict[str, Any] = {"id": task.id, "environment": task.environment, "domain": task.domain}
    metadata["reference"] = dict(task.reference)
    if task.thinking is not None:
        metadata["thinking"] = task.thinking
    return {PARAMETERS: parameters, METADATA: metadata}


def agent_of(server: str) -> str:
    """Return the name of the agent of one of our servers."""
    return f"{SERVER}_{server}_agent"


def of_gym(row: Mapping[str, Any], environment: str) -> Task:
    """Convert a row, ours or Gym's own, into a task.

    Args:
        environment: environment of the server that received the row.

    Raises:
        ValueError: a key is invalid, or the row is for another environment.
    """
    metadata, parameters = row.get(METADATA), row.get(PARAMETERS)
    if not isinstance(parameters, Mapping):
        raise ValueError(f"{PARAMETERS} must be a mapping, not {parameters!r}")
    tools = tuple(
        {"type": "function", "function": {key: tool[key] for key in tool if key not in ("type", "strict")}}
        for tool in check_listed(parameters.get("tools") or (), f"{PARAMETERS}.tools")
    )
    prompt = messages(parameters.get("input") or ())
    if isinstance(metadata, Mapping) and "environment" in metadata:
        check_keys(metadata, _KEYS, required=("environment",), where=METADATA)
        if metadata["environment"] != environment:
            given = metadata["environment"]
            raise ValueError(f"{METADATA}.environment must be {environment!r} for this server, not {given!r:.200}")
        reference = metadata.get("reference") or {}
        if not isinstance(reference, Mapping):
            raise ValueError(f"{METADATA}.reference must be a mapping, not {reference!r:.200}")
    else:
        metadata, reference = {}, _gym_reference(row, environment)
    return Task(
        id=str(metadata.get("id", "")),
        environment=environment,
        prompt=prompt,
        reference=reference,
        tools=check_tools(tools, f"{PARAMETERS}.tools"),
        domain=metadata.get("domain") or environment,
        thinking=metadata.get("thinking"),
    )


def messages(conversation: Any) -> tuple[Message, ...]:
    """Convert the input of an OpenAI Responses request, a string or a list of items, into messages without reasoning.

    Raises:
        ValueError: an item is invalid, for example not text, or a tool result without its call; the message names it.
    """
    if isinstance(conversation, str):
        return (Message(role="user", content=conversation),)
    parsed: list[Message] = []
    for index, item in enumerate(check_listed(conversation, f"{PARAMETERS}.input")):
        where = f"{PARAMETERS}.input[{index}]"
        kind = item.get("type") or "message"
        if kind == "function_call":
            read = read_openai_calls([item])
            if read.problems:
                raise ValueError(f"{where}: invalid function call ({read.problems[0]})")
            # Consecutive calls belong to one message.
            if parsed and parsed[-1].tool_calls:
                last = parsed.pop()
                parsed.append(Message(role="assistant", content=last.content, tool_calls=last.tool_calls + read.calls))
            elif parsed and parsed[-1].role == "assistant":
                parsed.append(Message(role="assistant", content=parsed.pop().content, tool_calls=read.calls))
            else:
                parsed.append(Message(role="assistant", tool_calls=read.calls))
        elif kind == "function_call_output":
            text = _text(item.get("output"), where)
            parsed.append(Message(role="tool", content=text, tool_call_id=item.get("call_id")))
        elif kind == "message":
            role = str(item.get("role"))
            if role not in _ROLES:
                raise ValueError(f"{where}.role must be one of {', '.join(_ROLES)}, not {role!r}")
            parsed.append(Message(role=_ROLES[role], content=_text(item.get("content"), where)))
        elif kind != "reasoning":
            raise ValueError(f"{where}.type must be message, function_call or function_call_output, not {kind!r}")
    return tuple(message for _, message in normal_messages(parsed, f"{PARAMETERS}.input"))


def check_listed(value: Any, where: str) -> list[Mapping[str, Any]]:
    """Return a list of mappings; for any other value, raise a ValueError that names `where`."""
    if not isinstance(value, list | tuple) or not all(isinstance(item, Mapping) for item in value):
        raise ValueError(f"{where} must be a list of mappings, not {value!r:.200}")
    return list(value)


def _items(message: Message) -> list[dict[str, Any]]:
    if message.role == "tool":
        return [{"type": "function_call_output", "call_id": message.tool_call_id or "", "output": message.content}]
    items: list[dict[str, Any]] = []
    if message.content or not message.tool_calls:
        items.append({"role": message.role, "content": message.content})
    for call in message.tool_calls:
        arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
        items.append({"type": "function_call", "call_id": call.id or "", "name": call.name, "arguments": arguments})
    return items


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    texts = [part.get("text") for part in check_listed(content, f"{where}.content")]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{where}.content must be a string, not {content!r:.200}")
    return "".join(texts)  # type: ignore[arg-type]


def _gym_reference(row: Mapping[str, Any], environment: str) -> Mapping[str, Any]:
    """Return our reference for a row of one of Gym's own servers; raise ValueError if the row is for another server."""
    for keys, convert in _GYM.get(environment, ()):
        if all(row.get(key) is not None for key in keys):
            return convert(row)
    alternatives = " or ".join(", ".join(keys) for keys, _ in _GYM.get(environment, ()))
    known = f" or the keys of Gym's own rows ({alternatives})" if alternatives else ""
    raise ValueError(f"expected a row with {METADATA}.environment{known}, not the keys {', '.join(map(str, row))}")


def _math(row: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"answer": row["expected_answer"]}


# Our answer format with the same place of the answer, by mcqa's grading_mode.
_MCQA = {
    "strict_single_letter_boxed": "letter",
    "lenient_boxed": "boxed",
    "lenient_answer_colon": "text",
    "lenient_answer_colon_md": "text",
}


def _multiple_choice(row: Mapping[str, Any]) -> Mapping[str, Any]:
    options = {key: text for option in check_listed(row["options"], "options") for key, text in option.items()}
    letters, mode = "".join(options), row.get("grading_mode", "strict_single_letter_boxed")
    if not ascii_uppercase.startswith(letters):
        raise ValueError(f"the letters of options must be A, B, C and so on in order, not {letters!r:.200}")
    if mode not in _MCQA:
        raise ValueError(f"unknown grading_mode {mode!r}: {nearest(str(mode), _MCQA)}")
    if row.get("template_metadata"):
        raise ValueError(
            "template_metadata is not supported, because only Gym's own mcqa server reads regular expressions from "
            "rows; remove it"
        )
    return {"answer": row["expected_answer"], "choices": list(options.values()), "format": _MCQA[mode]}


def _instructions(row: Mapping[str, Any]) -> Mapping[str, Any]:
    ids, kwargs = row["instruction_id_list"], row.get("kwargs") or [{}] * len(row["instruction_id_list"])
    if len(ids) != len(kwargs):
        raise ValueError(
            f"instruction_id_list and kwargs must have the same number of items, not {len(ids)} and {len(kwargs)}"
        )
    instructions = [{"id": name, "kwargs": arguments or {}} for name, arguments in zip(ids, kwargs, strict=True)]
    return {"instructions": instructions, "mode": {"fraction": "share"}.get(row.get("grading_mode", ""), "all")}


def _structured(row: Mapping[str, Any]) -> Mapping[str, Any]:
    for key, supported in (("schema_type", "json"), ("response_mode", "text")):
        if row.get(key, supported) not in (supported, None):
            raise ValueError(
                f"{key} must be {supported}, not {row[key]!r}, which only Gym's own structured_outputs supports"
            )
    return {"schema": row["schema_str"], "strict": True}


def _code(row: Mapping[str, Any]) -> Mapping[str, Any]:
    tests = row[METADATA].get("unit_tests") if isinstance(row[METADATA], Mapping) else None
    if not isinstance(tests, Mapping) or tests.get("fn_name"):
        raise ValueError(
            f"{METADATA}.unit_tests must have inputs and outputs and no fn_name, because only programs that read "
            f"standard input are supported, not {tests!r:.200}"
        )
    pairs = zip(tests["inputs"], tests["outputs"], strict=True)
    return {
        "language": "python",
        "style": "stdin",
        "tests": [{"input": text, "output": expected} for text, expected in pairs],
    }


def _calls(row: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"expected": row["expected_answers"], "tools": row[PARAMETERS].get("tools")}


def _rubric(row: Mapping[str, Any]) -> Mapping[str, Any]:
    said = [f"{message.role}: {message.content}" for message in messages(row[PARAMETERS]["input"])]
    items = [f"- {item['question']} (expected: {item.get('pass_criteria', 'YES')})" for item in row["rubric"]]
    rubric = "One point for each of these questions on the response whose answer is the expected one:"
    return {"question": "\n\n".join(said), "rubric": "\n".join([rubric, *items]), "best": len(items)}


def _action(row: Mapping[str, Any]) -> Mapping[str, Any]:
    action = row["expected_action"]
    called = action["type"] == "function_call"
    return {"expected": [{"name": action["name"], "arguments": action["arguments"]}] if called else []}


Reading = tuple[tuple[str, ...], Callable[[Mapping[str, Any]], Mapping[str, Any]]]
_GYM: Mapping[str, tuple[Reading, ...]] = {
    "math": ((("expected_answer",), _math),),
    "python_tool": ((("expected_answer",), _math),),
    "multiple_choice": ((("options", "expected_answer"), _multiple_choice),),
    "instructions": ((("instruction_id_list",), _instructions),),
    "structured_output": ((("schema_str",), _structured),),
    "code": (((METADATA,), _code),),
    "tool_calls": ((("expected_answers",), _calls), (("expected_action",), _action)),
    "graded": ((("rubric",), _rubric),),
}
