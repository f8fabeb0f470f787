"""Tokens of a probe: a text that is likely under the model, because rounding shows most where nothing is likely."""

from __future__ import annotations

import torch
from transformers import DynamicCache, PreTrainedModel


@torch.inference_mode()
def probe_tokens(model: PreTrainedModel, length: int, *, seed: int = 0) -> tuple[int, ...]:
    """Sample `length` tokens at temperature 1 after the model's first token (or token 0); deterministic."""
    generator = torch.Generator().manual_seed(seed)
    cache = DynamicCache(config=model.config)
    first = model.config.get_text_config().bos_token_id
    ids = [first if isinstance(first, int) else 0]
    while len(ids) < length:
        newest = torch.tensor([ids[-1:]], device=model.device)
        logits_V = model(input_ids=newest, past_key_values=cache, use_cache=True).logits[0, -1]
        probs_V = logits_V.float().softmax(-1).cpu()
        ids.append(int(torch.multinomial(probs_V, 1, generator=generator)))
    return tuple(ids)
