"""Reward model: equal to a direct forward, in any batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedModel, PreTrainedTokenizerFast

from rlsys.errors import DataError, ModelError
from rlsys.types import Prompt
from tests.models import SIZES, VOCAB, tiny_llama
from workers.reward.reward_model import RewardModel

TEMPLATE = "{% for m in messages %}{{ ':' if m.role == 'user' else ';' }}{{ m.content }}{% endfor %}"
"""`:` and `;` are symbols of the tests' tokenizer, tokens 10 and 11."""
CHAT: Prompt = ({"role": "user", "content": "12"},)
PAD = 39


def classifier(num_labels: int = 1, pad: int | None = PAD) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_key_value_heads=2, pad_token_id=pad)
    config.num_labels = num_labels
    return LlamaForSequenceClassification(config).eval()


@pytest.fixture(scope="module")
def direct() -> PreTrainedModel:
    return classifier()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, direct: PreTrainedModel) -> str:
    return save(tmp_path_factory.mktemp("plain"), direct)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, direct: PreTrainedModel) -> str:
    return save(tmp_path_factory.mktemp("classifier"), direct, TEMPLATE)


def save(path: Path, model: PreTrainedModel, template: str | None = None) -> str:
    """The model and a tokenizer of one token a character, from `0` on."""
    tokenizer = Tokenizer(WordLevel({chr(48 + i): i for i in range(VOCAB)}, unk_token="0"))
    tokenizer.pre_tokenizer = Split("", "isolated")  # type: ignore[assignment]
    model.save_pretrained(path)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template).save_pretrained(path)
    return str(path)


def reward_model(path: str, max_tokens: int = 64) -> RewardModel:
    return RewardModel(path, "float32", max_tokens, 1.0, torch.device("cpu"))


@torch.inference_mode()
def logit(model: PreTrainedModel, text: str) -> float:
    """A direct forward of one text, one token a character, without padding."""
    return model(input_ids=torch.tensor([[ord(c) - 48 for c in text]])).logits[0, 0].item()


def test_plain_text_is_put_together_without_a_template(direct: PreTrainedModel, plain: str) -> None:
    assert reward_model(plain).score("12", ["34"]) == pytest.approx([logit(direct, "1234")], abs=1e-6)


def test_messages_are_rendered_with_the_models_own_template(direct: PreTrainedModel, folder: str) -> None:
    assert reward_model(folder).score(CHAT, ["34"]) == pytest.approx([logit(direct, ":12;34")], abs=1e-6)


def test_a_text_prompt_is_a_users_message_where_there_is_a_template(direct: PreTrainedModel, folder: str) -> None:
    assert reward_model(folder).score("12", ["34"]) == pytest.approx([logit(direct, ":12;34")], abs=1e-6)


def test_a_batch_of_different_lengths_equals_one_by_one(direct: PreTrainedModel, plain: str) -> None:
    completions = ["", "3", "3456789", "33"]
    together = reward_model(plain).score("12", completions)
    assert together == pytest.approx([logit(direct, "12" + c) for c in completions], abs=1e-6)
    assert len(set(together)) == 4


def test_of_what_is_too_long_the_end_is_scored(direct: PreTrainedModel, plain: str) -> None:
    short = reward_model(plain, max_tokens=4)
    wanted = [logit(direct, "5678"), logit(direct, "123")]
    assert short.score("12", ["345678", "3"]) == pytest.approx(wanted, abs=1e-6)


def test_bfloat16_is_close_to_float32(folder: str) -> None:
    rough = RewardModel(folder, "bfloat16", 64, 1.0, torch.device("cpu"))
    assert rough.score("12", ["34", "5"]) == pytest.approx(reward_model(folder).score("12", ["34", "5"]), abs=0.05)


def test_a_model_without_a_template_judges_no_messages(tmp_path: Path) -> None:
    model = reward_model(save(tmp_path, classifier()))
    with pytest.raises(DataError, match=r"the reward model .* has no chat template"):
        model.score(CHAT, ["3"])


def test_a_template_refusal_names_the_reward_model_and_reason(tmp_path: Path) -> None:
    model = reward_model(save(tmp_path, classifier(), "{{ raise_exception('only users speak') }}"))
    with pytest.raises(DataError, match=r"of the reward model .* refuses .* user, assistant: only users speak; give"):
        model.score(CHAT, ["3"])


def test_what_is_no_reward_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"args\.path of the reward model '.*nowhere' does not exist"):
        reward_model(str(tmp_path / "nowhere"))
    with pytest.raises(ModelError, match=r"lacks 1 of the weights of a sequence classifier, as 'score\.weight'"):
        reward_model(save(tmp_path / "causal", tiny_llama()))
    with pytest.raises(ModelError, match="has 3 labels; a reward model has exactly one"):
        reward_model(save(tmp_path / "three", classifier(num_labels=3)))
    with pytest.raises(ModelError, match="names no padding token"):
        reward_model(save(tmp_path / "padless", classifier(pad=None)))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="does not load as a sequence classifier"):
        reward_model(str(tmp_path / "empty"))
