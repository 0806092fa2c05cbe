"""A stand-in endpoint: `python benchmarks/stand_in.py --port 8000 --seconds 0.02 --faults 0.2`.

The request alone determines the answer and whether it is slow.
"""

import argparse
import asyncio
import hashlib
import json
import random

from aiohttp import web

FAULTS = ("400", "429", "500", "hang", "half", "wrong_json", "closed", "slow")


def answer_to(body: dict) -> str:
    text = json.dumps([body.get("messages"), body.get("prompt"), body.get("temperature") and body.get("seed")])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_bad(body: dict) -> bool:
    """True for rows that the endpoint always refuses."""
    return "refuse me" in json.dumps(body)


class StandIn:
    def __init__(
        self, *, seconds: float, slow_share: float = 0.0, slow_seconds: float = 0.0, faults: float = 0.0, seed=0
    ):
        self.seconds, self.slow_share, self.slow_seconds, self.faults = seconds, slow_share, slow_seconds, faults
        self.random = random.Random(seed)
        self.asked = 0

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m"}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked += 1
        if is_bad(body):
            return web.json_response({"error": {"message": "refused for its content"}}, status=400)
        fault = self.random.choice(FAULTS[1:]) if self.random.random() < self.faults else None
        text = answer_to(body)
        seconds = self.slow_seconds if int(text, 16) < self.slow_share * 16 ** len(text) else self.seconds
        if fault == "429":
            return web.Response(status=429, headers={"Retry-After": "0.1"})
        if fault == "500":
            return web.Response(status=500, text="boom")
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "closed":
            request.transport.close()
            return web.Response()
        await asyncio.sleep(seconds)
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}, "text": text}
        made = json.dumps(
            {"id": "x", "choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": len(text)}}
        )
        if fault == "wrong_json":
            return web.Response(text="{" + made)
        if fault in ("half", "slow"):
            response = web.StreamResponse(headers={"Content-Length": str(len(made))})
            await response.prepare(request)
            if fault == "slow":
                await asyncio.sleep(0.3)
                await response.write(made.encode())
                return response
            await response.write(made[: len(made) // 2].encode())
            request.transport.close()
            return response
        return web.Response(text=made, content_type="application/json")

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 24)
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/v1/models", self.models),
                web.post("/v1/chat/completions", self.chat),
                web.post("/v1/completions", self.chat),
            ]
        )
        return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name, default in (("seconds", 0.02), ("slow_share", 0.0), ("slow_seconds", 0.0), ("faults", 0.0)):
        parser.add_argument(f"--{name}", type=float, default=default)
    parser.add_argument("--port", type=int, default=0)
    given = vars(parser.parse_args())
    port = given.pop("port")
    web.run_app(StandIn(**given).app(), host="127.0.0.1", port=port, access_log=None, print=None)
