"""Log-probabilities of a prompt's tokens at an endpoint, through `/v1/completions` with `echo`."""

from typing import Any

from nemo_ext.endpoint.client import Answer, Client, Request
from nemo_ext.endpoint.failures import REFUSED


class Echo:
    """Measurement of the log-probabilities of prompts at an endpoint."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._least = 0

    async def measured(self, prompt: str | list[int]) -> Answer:
        """Request the log-probabilities of a prompt's tokens, with one generated token if the endpoint requires it.

        Args:
            prompt: string or token ids.

        Returns:
            Answer with `logprobs` in the first choice of its body, or with a `problem`.

        Raises:
            ValueError: the endpoint rejects the API key.
        """
        body = {"prompt": prompt, "echo": True, "logprobs": 1, "temperature": 0}
        least = self._least
        answer = await self.ask({**body, "max_tokens": least})
        if answer.status in (400, 422) and not least:
            again = await self.ask({**body, "max_tokens": 1})
            if not again.problem:
                self._least = 1
            return again
        return answer

    async def of_tokens(self, tokens: list[int], last: int) -> list[float]:
        """Return the log-probabilities in nats of the last tokens of a prompt, `[last]`, each given those before it.

        Args:
            tokens: token ids of the prompt.
            last: number of tokens to measure at the end of the prompt; the prompt must have more.

        Raises:
            ValueError: the endpoint rejects the API key or does not return one number per token.
        """
        answer = await self.measured(tokens)
        if answer.problem:
            raise ValueError(
                f"endpoint {self.client.address.url} did not return log-probabilities ({answer.problem}): correct the "
                "cause, or serve the model with `nemo-ext serve` or vLLM"
            )
        try:
            values = answer.body["choices"][0]["logprobs"]["token_logprobs"][len(tokens) - last : len(tokens)]
            numbers = [float(value) for value in values]
        except (LookupError, TypeError, ValueError):
            numbers = []
        if len(numbers) != last:
            raise ValueError(
                f"endpoint {self.client.address.url} does not return log-probabilities of a prompt's tokens (echo, "
                "logprobs); serve the model with `nemo-ext serve` or vLLM"
            )
        return numbers

    async def ask(self, body: dict[str, Any]) -> Answer:
        """Send a request to `/completions`; raise ValueError if the endpoint rejects the API key."""
        answer = await self.client.ask(Request(body=body, path="completions"))
        if answer.status in REFUSED:
            raise ValueError(f"endpoint {self.client.address.url} denied access: {answer.problem}")
        return answer
