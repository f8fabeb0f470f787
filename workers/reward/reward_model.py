"""A reward model: a Hugging Face classifier with one label, whose logit is the score of a completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, cast

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from rlsys.agents.session_budget import messages_of
from rlsys.errors import ModelError
from rlsys.types import Message, Prompt
from workers.model.model_loading import load_pretrained, load_tokenizer, on_device
from workers.text.tokenizer import render_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_KEY = "args.path of the reward model"


class RewardModel:
    """Scores completions. A plain class, used by a reward worker."""

    def __init__(
        self,
        path: str,
        dtype: Literal["float32", "bfloat16"],
        max_tokens: int,
        weight: float,
        device: torch.device,
    ) -> None:
        """`max_tokens` bounds prompt and completion together; longer texts keep their end. `weight` is the weight of
        the value in the reward.

        Raises `ModelError` if the path has no classifier with one label, or no tokenizer.
        """
        self.weight = weight
        self._path, self._max_tokens, self._device = path, max_tokens, device
        kind = AutoModelForSequenceClassification
        model = load_pretrained(kind, path, getattr(torch, dtype), key=_KEY, what="sequence classifier")
        if model.config.num_labels != 1:
            raise ModelError(f"{_KEY} {path!r} has {model.config.num_labels} labels; a reward model has exactly one")
        self._model = on_device(model, device)
        self._tokenizer = load_tokenizer(path, _KEY)
        self._tokenizer.truncation_side = "left"
        self._template = self._tokenizer.get_chat_template() if self._tokenizer.chat_template else None
        _agree_on_padding(self._model, self._tokenizer, path)

    @torch.inference_mode()
    def score(self, prompt: Prompt, completions: Sequence[str]) -> list[float]:
        """The logit of each completion, in one batch.

        Messages are rendered with the model's own chat template, the completion as the assistant's turn; a text prompt
        is a user's message. Without a template, text is concatenated. Raises `DataError` for messages if there is no
        template or if it refuses them.
        """
        inputs = self._tokenizer(
            [self._text(prompt, completion) for completion in completions],
            add_special_tokens=not self._template,  # a chat template has already written them
            padding=True,
            padding_side="right",
            truncation=True,
            max_length=self._max_tokens,
            return_tensors="pt",
        )
        return self._model(**inputs.to(self._device)).logits[:, 0].float().tolist()

    def _text(self, prompt: Prompt, completion: str) -> str:
        if isinstance(prompt, str) and not self._template:
            return prompt + completion
        messages = (*messages_of(prompt), Message(role="assistant", content=completion))
        whose = f"the reward model {self._path!r}"
        return render_template(self._tokenizer, messages, self._template, whose=whose, opens_turn=False)


def _agree_on_padding(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Give model and tokenizer the same padding token: decoders score at the last token that is not padding."""
    config = model.config.get_text_config()
    pad = next(
        (i for i in (config.pad_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), None
    )
    if pad is None:
        raise ModelError(f"{_KEY} {path!r} names no padding token; set pad_token in its tokenizer")
    config.pad_token_id = pad
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(cast("int", pad))
