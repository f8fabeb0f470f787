"""Character tokenizer in the Hugging Face format: one id per character, no start token, `<eos>` ends an answer."""

from __future__ import annotations

import string

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, EOS = "<pad>", "<eos>"
CHARACTERS = string.digits + string.ascii_letters + " \n!\"#$%&'()*+,-./:;<=>?[]|"
"""Characters of the policy; with the two special tokens, a vocabulary of 90."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer; `save_pretrained` saves it beside a model for `AutoTokenizer`.

    `385120>` becomes seven ids. A character outside `CHARACTERS` raises, because there is no unknown token.
    """
    vocabulary = {symbol: index for index, symbol in enumerate([PAD, EOS, *CHARACTERS])}
    core = Tokenizer(models.WordLevel(vocabulary))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False
    )
