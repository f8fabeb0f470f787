"""Limits of the requests that an engine accepts."""

from __future__ import annotations

from dataclasses import dataclass

from rlsys.errors import TaskTooLong
from workers.engines.engine import Request

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
"""Besides 0 (greedy). Above, samples are noise and vLLM refuses; below, vLLM would silently use its minimum."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits that every request must meet."""

    max_context: int
    """Maximum tokens of prompt and completion together."""
    num_vocab: int
    stop_token_ids: frozenset[int] = frozenset()

    def check(self, worker: str, request: Request) -> None:
        """Raise `TaskTooLong` if the request exceeds the context, `ValueError` if it is invalid."""
        num_prompt, num_new = len(request.prompt_ids), request.sampling.max_new_tokens
        if num_prompt + num_new > self.max_context:
            raise TaskTooLong(
                worker,
                f"taking request {request.id}",
                f"{num_prompt} prompt tokens + {num_new} new tokens exceed the context of {self.max_context}: "
                "shorten the prompt, lower max_new_tokens or raise the engine's max_context",
            )
        temperature, top_p = request.sampling.temperature, request.sampling.top_p
        if not ((temperature == 0 or MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE) and 0 < top_p <= 1):
            raise ValueError(
                f"request {request.id}: temperature must be 0 or in [{MIN_TEMPERATURE:g}, {MAX_TEMPERATURE:g}], and "
                f"top_p in (0, 1]; got {temperature:g} and {top_p:g}"
            )
        if not (num_prompt and num_new > 0 and self._are_known(request.prompt_ids)):
            raise ValueError(
                f"request {request.id} needs at least one prompt id, all in [0, {self.num_vocab}), and max_new_tokens "
                f">= 1; got {num_prompt} ids, max_new_tokens {num_new}: is the tokenizer the model's?"
            )
        self._check_begun(request)

    def _check_begun(self, request: Request) -> None:
        """Raise `ValueError` unless the `begun` tokens of a request are complete and can be continued."""
        begun = request.begun
        if begun is None or not request.num_begun:
            return
        num_ids, num_logprobs = request.num_begun, len(begun.logprobs)
        num_marked = sum(span.num_tokens for span in begun.versions)
        if not (num_ids == num_logprobs == num_marked and self._are_known(begun.output_ids)):
            raise ValueError(
                f"request {request.id} has begun with {num_ids} ids, {num_logprobs} logprobs and versions of "
                f"{num_marked} tokens: these must be equally many, and the ids in [0, {self.num_vocab}); hand over the "
                "completion as an engine returned it"
            )
        if begun.finish == "stop" or begun.output_ids[-1] in self.stop_token_ids:
            raise ValueError(f"request {request.id} has begun with a completion that ended with a stop token")
        if num_ids >= request.sampling.max_new_tokens:
            raise ValueError(
                f"request {request.id} has begun with {num_ids} tokens, and max_new_tokens, which counts them, is "
                f"{request.sampling.max_new_tokens}: it has ended, or raise max_new_tokens"
            )

    def _are_known(self, ids: tuple[int, ...]) -> bool:
        return min(ids) >= 0 and max(ids) < self.num_vocab
