"""Start and stop tokens, chat templates and their options, as the makers of a model mean them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GenerationConfig, PreTrainedTokenizerFast

from rlsys.config.chat_section import ChatSection
from rlsys.errors import ConfigError, DataError
from rlsys.types import ChatOptions, Message, Task
from workers.text.tokenizer import TextTokenizer

GEMMA = """\
{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ m.content | trim }}<end_of_turn>
{% endfor %}
{%- if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
PHI_3 = """\
{% for m in messages %}<|{{ m.role }}|>
{{ m.content }}<|end|>
{% endfor %}
{%- if add_generation_prompt %}<|assistant|>
{% else %}<|endoftext|>{% endif %}"""
LLAMA_3 = """\
{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
CHATML = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
MISTRAL = """\
{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]
{%- else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"""
HARMONY = """\
{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}
{%- if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""


def tokenizer_of(
    template: str | None, special: Sequence[str], *, bos: str | None = None, eos: str | None = None
) -> PreTrainedTokenizerFast:
    """Characters and special tokens. `bos` comes before every text, as the tokenizer says."""
    symbols = [*special, "\n", *map(chr, range(32, 127))]
    core = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(symbols)}))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(".|\n"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(list(special))
    if bos is not None:
        core.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, special.index(bos))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=bos, eos_token=eos)
    tokenizer.chat_template = template
    return tokenizer


def gemma() -> PreTrainedTokenizerFast:
    return tokenizer_of(GEMMA, ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], bos="<bos>", eos="<eos>")


def chatml() -> PreTrainedTokenizerFast:
    return tokenizer_of(CHATML, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], eos="<|endoftext|>")


LLAMA_TOKENS = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
LLAMA = {"special": LLAMA_TOKENS, "bos": "<|begin_of_text|>", "eos": "<|end_of_text|>"}
PHI = {"special": ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"], "eos": "<|endoftext|>"}
HARMONY_TOKENS = ["<|return|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"]
MAKERS = {
    "gemma": (gemma(), ["<eos>", "<end_of_turn>"]),
    "phi-3": (tokenizer_of(PHI_3, **PHI), ["<|endoftext|>", "<|end|>"]),
    "llama-3": (tokenizer_of(LLAMA_3, **LLAMA), ["<|end_of_text|>", "<|eot_id|>"]),
    "chatml": (chatml(), ["<|endoftext|>", "<|im_end|>"]),
    "mistral": (tokenizer_of(MISTRAL, ["<s>", "</s>"], bos="<s>", eos="</s>"), ["</s>"]),
    "harmony": (tokenizer_of(HARMONY, HARMONY_TOKENS, eos="<|return|>"), ["<|return|>"]),
    "no template": (tokenizer_of(None, ["<s>", "</s>"], bos="<s>", eos="</s>"), ["</s>"]),
}


def user(text: str) -> tuple[Message, ...]:
    return (Message(role="user", content=text),)


@pytest.mark.parametrize("maker", MAKERS)
def test_replies_stop_at_the_tokenizers_end_and_the_templates_end_of_turn(maker: str):
    tokenizer, stops = MAKERS[maker]
    codec = TextTokenizer(tokenizer)
    assert sorted(codec.spell([token]) for token in codec.stop_ids) == sorted(stops)
    assert codec.spell(codec.reply("ok")) == f"ok{stops[-1]}", "a recorded reply ends as a sampled one does"


def test_end_tokens_of_the_generation_configuration_stop_replies_too(tmp_path: Path):
    tokenizer = tokenizer_of(HARMONY, HARMONY_TOKENS, eos="<|return|>")
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "eos_token_id": 3}')
    assert TextTokenizer.load(tmp_path).stop_ids == {0, 3}, "config.json speaks where nothing else does"
    GenerationConfig(eos_token_id=[0, 5]).save_pretrained(tmp_path)
    assert TextTokenizer.load(tmp_path).stop_ids == {0, 5}


@pytest.mark.parametrize("maker", MAKERS)
def test_start_tokens_are_those_of_the_tokenizer(maker: str):
    tokenizer, _ = MAKERS[maker]
    codec = TextTokenizer(tokenizer)
    assert list(codec.encode("ab")) == tokenizer("ab")["input_ids"]
    assert codec.append("ab") == codec.encode("ab")[-2:], "text that continues a context has no start token"
    if tokenizer.chat_template:
        conversation = [{"role": "user", "content": "ab"}]
        theirs = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
        assert list(codec.encode(user("ab"))) == theirs


def test_a_system_message_of_the_configuration_opens_conversations_without_one():
    codec = TextTokenizer(chatml(), ChatSection(system="Be brief."))
    own = (Message(role="system", content="Be long."), *user("y"))
    assert codec.spell(codec.encode(user("y"))).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user")
    assert "brief" not in codec.spell(codec.encode(own))


def test_a_system_message_of_a_task_replaces_that_of_the_configuration():
    codec = TextTokenizer(chatml(), ChatSection(system="Be brief."))
    task = Task(id="t", prompt="y", system="Be long.")
    assert codec.spell(codec.encode_task(task)).startswith(
        "<|im_start|>system\nBe long.<|im_end|>\n<|im_start|>user\ny"
    )
    assert "system" not in codec.spell(codec.encode_task(Task(id="t", prompt="y", system="")))


def test_a_system_message_joins_the_first_message_where_the_template_knows_none():
    codec = TextTokenizer(gemma(), ChatSection(system="Be brief."))
    assert codec.spell(codec.encode(user("y"))).startswith("<bos><start_of_turn>user\nBe brief.\n\ny<end_of_turn>")


def test_template_variables_come_from_the_row_before_the_configuration():
    codec = TextTokenizer(chatml(), ChatSection(template_kwargs={"enable_thinking": False}))
    assert codec.spell(codec.encode(user("y"))).endswith("<think>\n\n</think>\n\n")
    assert codec.opening_of(codec.encode(user("y"))) == "", "it is closed"
    options = ChatOptions(template_kwargs={"enable_thinking": True})
    assert codec.spell(codec.encode(user("y"), options)).endswith("assistant\n")


def test_a_thought_that_the_template_begins_is_known():
    tokenizer = chatml()
    tokenizer.chat_template = CHATML.replace("{% if enable", "<think>\n{% if enable")
    codec = TextTokenizer(tokenizer)
    assert codec.opening_of(codec.encode(user("y"))) == "<think>"


@pytest.mark.parametrize("as_file", [True, False])
def test_another_template_replaces_the_tokenizers(tmp_path: Path, as_file: bool):
    text = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    (tmp_path / "chat.jinja").write_text(text)
    section = ChatSection(template=str(tmp_path / "chat.jinja") if as_file else text)
    codec = TextTokenizer(tokenizer_of(None, ["<s>", "<|im_end|>"], eos="<s>"), section.with_text())
    assert codec.has_chat_template and codec.spell(codec.encode(user("y"))) == "y<|im_end|>"
    assert codec.stop_ids == {0, 1}


def test_a_template_file_that_cannot_be_read_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"rollout\.chat\.template: cannot read .*nope\.jinja"):
        ChatSection(template=str(tmp_path / "nope.jinja")).with_text()
    (tmp_path / "plain.txt").write_text("no template")
    with pytest.raises(ConfigError, match=r"rollout\.chat\.template: .*plain\.txt is no Jinja template"):
        ChatSection(template=str(tmp_path / "plain.txt")).with_text()


def test_without_a_template_by_configuration_prompts_are_plain_text():
    codec = TextTokenizer(chatml(), ChatSection(template="none"))
    assert not codec.has_chat_template and codec.stop_ids == {0}
    with pytest.raises(DataError, match="no chat template"):
        codec.encode(user("y"))


@pytest.mark.parametrize("maker", ["gemma", "phi-3", "llama-3", "chatml", "mistral"])
def test_a_prompt_that_ends_with_the_assistant_is_continued(maker: str):
    codec = TextTokenizer(MAKERS[maker][0])
    begun = (*user("2+3?"), Message(role="assistant", content="The sum is 5"))
    text = codec.spell(codec.encode(begun))
    assert text.endswith("The sum is 5") and text.count("The sum") == 1
    whole = codec.encode(begun) + codec.reply(".")
    after = codec.extend(whole, (*user("2+3?"), Message(role="assistant", content="The sum is 5.")), user("Sure?"))
    assert after[: len(whole)] == whole, "and the conversation goes on after it, token for token"
