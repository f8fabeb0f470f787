"""The key `rollout.chat`: how a conversation becomes the text that a model reads."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, JsonValue

from rlsys.config.section import PathText, Section
from rlsys.errors import ConfigError

NO_TEMPLATE = "none"
"""`ChatSection.template` of a model that reads plain text, although its tokenizer has a chat template."""


class ChatSection(Section):
    """Chat template and system message. A text prompt is a user's message where there is a template."""

    system: str | None = None
    """System message of conversations that do not begin with one; None: none. It joins the first message where the
    template knows no role `system`."""
    template: PathText | None = None
    """File with a Jinja chat template, instead of the tokenizer's. `none`: no template, so that prompts are plain text,
    which the tokenizer's start token opens."""
    template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Variables of the template, e.g. `{enable_thinking: false}`; a row's `chat_template_kwargs` come before these."""
    skip_special_tokens: bool = False
    """Leave the tokenizer's special tokens out of the text of replies, which rewards, tools and agents read. The token
    that ends a reply is always left out."""

    def with_text(self) -> Self:
        """Replace the file of `template` by its text, for processes that do not see the file. Raises `ConfigError`."""
        if self.template is None or self.template == NO_TEMPLATE or "{" in self.template:
            return self
        try:
            text = Path(self.template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"rollout.chat.template: cannot read {self.template}: {error}; or set `none`") from error
        if "{" not in text:
            raise ConfigError(f"rollout.chat.template: {self.template} is no Jinja template: it has no expression")
        return self.model_copy(update={"template": text})
