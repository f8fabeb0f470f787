"""End of a completion at a text, such as `</answer>`, wherever the tokens of the text begin and end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

BYTES_PER_CHARACTER = 4
"""Most bytes, and so most tokens, of one character."""


class StopTexts:
    """Check of completions for the texts that end them."""

    def __init__(self, decode: Callable[[tuple[int, ...]], str] | None) -> None:
        """`decode` gives the text of token ids; None where no request has a stop text."""
        self._decode = decode

    def end(self, stop: Sequence[str], ids: Sequence[int]) -> bool:
        """True if a text of `stop` ends in the last of these tokens, and did not before."""
        return bool(stop) and self._has(stop, ids) and not self._has(stop, ids[:-1])

    def window(self, stop: Sequence[str]) -> int:
        """Number of last tokens that `end` needs."""
        return BYTES_PER_CHARACTER * max(map(len, stop), default=0) + 1

    def _has(self, stop: Sequence[str], ids: Sequence[int]) -> bool:
        assert self._decode is not None, "requests with stop texts need a tokenizer"
        text = self._decode(tuple(ids[-self.window(stop) :]))
        return any(each in text for each in stop)


NO_STOP_TEXTS = StopTexts(None)
