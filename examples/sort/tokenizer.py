"""A character tokenizer in the Hugging Face format: one id per character, no start token, `<eos>` ends an answer."""

from __future__ import annotations

import string

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, EOS = "<pad>", "<eos>"
CHARACTERS = string.digits + string.ascii_letters + " \n!\"#$%&'()*+,-./:;<=>?[]|"
"""What the policy can read and write; with the two special tokens, a vocabulary of 90."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer; `save_pretrained` puts it beside a model, where `AutoTokenizer` finds it.

    `385120>` becomes seven ids. A character outside `CHARACTERS` raises: there is no unknown token to hide it.
    """
    vocabulary = {symbol: index for index, symbol in enumerate([PAD, EOS, *CHARACTERS])}
    core = Tokenizer(models.WordLevel(vocabulary))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False
    )
