"""NeMo Gym's servers in this process."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

BASE = {"host": "127.0.0.1", "port": 0, "entrypoint": "app.py", "name": "nemo_ext", "domain": "other"}


def response(*output: dict[str, Any], **given: Any) -> dict[str, Any]:
    """OpenAI response with these items."""
    return {
        "id": "resp_1",
        "created_at": 0.0,
        "model": "stand-in",
        "object": "response",
        "output": list(output),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        **given,
    }


def said(text: str) -> dict[str, Any]:
    """Message item of the model."""
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": content}


def thought(text: str) -> dict[str, Any]:
    """Reasoning item of the model."""
    return {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": text}]}


def called(name: str, arguments: str, call_id: str = "call_1") -> dict[str, Any]:
    """Function call of the model."""
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def usage(tokens: int) -> dict[str, Any]:
    """Token usage as a model server reports it."""
    return {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": tokens + 5,
    }


@pytest.fixture(scope="session")
def openai() -> SimpleNamespace:
    """Builders of responses of Gym's model server."""
    return SimpleNamespace(response=response, said=said, thought=thought, called=called, usage=usage)


Serve = Callable[..., Any]


@pytest.fixture
def serve() -> Serve:
    """Function that starts a server with a config and returns a client: `serve(environment="math")`."""
    pytest.importorskip("nemo_gym", reason="needs nemo-gym")
    from fastapi.testclient import TestClient
    from nemo_gym.server_utils import ServerClient

    from nemo_ext.rl.gym.comparison import ComparisonConfig, ComparisonServer
    from nemo_ext.rl.gym.server import VerifierConfig, VerifierServer

    def client_of(**config: Any) -> TestClient:
        kinds = (ComparisonServer, ComparisonConfig) if "group_size" in config else (VerifierServer, VerifierConfig)
        server, settings = kinds
        client = MagicMock(spec=ServerClient)
        app = (made := server(config=settings(**{**BASE, **config}), server_client=client)).setup_webserver()
        app.state.server = made
        return TestClient(app, raise_server_exceptions=False)

    return client_of
