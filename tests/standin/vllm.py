"""Stands in for vLLM: answers any chat deterministically on the given address, to clients with the key.

Started as `vllm serve FOLDER --flag value`; it ends if the folder has a file `broken`, and keeps answers back as
long as a file `hold` is beside it. Its words are noted in the folder STAND_IN_NOTES, if there is one.
"""

import json
import os
import signal
import sys
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any


class Handler(BaseHTTPRequestHandler):
    """The part of OpenAI's API that clients here ask for."""

    protocol_version = "HTTP/1.1"
    name = ""
    hold = Path()

    def do_GET(self) -> None:
        """Health is for everybody."""
        if self.path == "/health" or self._may():
            self._say({"data": [{"id": self.name}]} if self.path == "/v1/models" else {})

    def do_POST(self) -> None:
        """An answer that depends on the prompt alone."""
        given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._may():
            return
        while self.hold.exists() and given.get("max_tokens") != 1:  # a health probe
            time.sleep(0.1)
        text = f"answer {zlib.crc32(json.dumps(given.get('messages', given.get('prompt'))).encode())}"
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "text": text}
        choice["message"] = {"role": "assistant", "content": text}
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        self._say({"id": "a", "object": "chat.completion", "model": self.name, "choices": [choice], "usage": usage})

    def _may(self) -> bool:
        if self.headers.get("Authorization") == f"Bearer {os.environ.get('VLLM_API_KEY')}":
            return True
        self._say({"error": "the key is missing"}, 401)
        return False

    def _say(self, what: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(what).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *given: Any) -> None:
        """Nothing."""


def main() -> None:
    """Serve until a signal."""
    words = sys.argv[1:]
    given = dict(pairwise(words))
    if (notes := os.environ.get("STAND_IN_NOTES")) is not None:
        rank = given.get("--node-rank", "0")
        Path(notes, f"{rank}-{os.environ['SLURM_JOB_ID']}").write_text(" ".join(words))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(0))
    if Path(words[1], "broken").exists():
        sys.exit("broken")
    if "--headless" in words:
        signal.pause()
    Handler.name, Handler.hold = given["--served-model-name"], Path(words[1]).with_name("hold")
    server = ThreadingHTTPServer((given["--host"], int(given["--port"])), Handler)
    server.serve_forever()


if __name__ == "__main__":
    main()
