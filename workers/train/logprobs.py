"""Logprobs of trained tokens under a causal language model, with each distinct prompt run once.

A prompt's keys and values are computed once, *with gradient*, and expanded to the samples that continue it. The
completions then run on top of that cache. The result and its gradient equal those of plain forwards over whole
sequences, but the members of a group share the cost of their prompt. Logits exist only for trained tokens, one chunk at
a time.

Shape suffixes: as in `rlsys.batch.tensors`, and `V` vocabulary, `H` hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rlsys.batch.tensors import MicroBatch
from rlsys.errors import ModelError
from workers.train.activations import continued, prompt_cache

MAX_LOGITS = 2**25
"""Logits alive at once (128 MiB in fp32). More are computed in chunks, and again in the backward pass."""


class Scorer(nn.Module):
    """`trained_logprobs` as one module, so that FSDP sees the two passes over the layers as one forward of its root."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, micro_batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        return trained_logprobs(self.model, micro_batch, temperature)


def trained_logprobs(
    model: PreTrainedModel, micro_batch: MicroBatch, temperature: float, *, max_logits: int = MAX_LOGITS
) -> tuple[Tensor, Tensor]:
    """`(logprobs_N, entropy_N)` of the trained tokens at a sampling temperature, in nats and fp32; entropy is detached.

    At most `max_logits` logits are alive at once, or those of one token. Raises `ModelError`, see `hidden_states`.
    """
    tokens_N = micro_batch.completions_ST.flatten()[micro_batch.trained_N]
    head = cast("nn.Linear", model.get_output_embeddings())
    return token_logprobs(head, hidden_states(model, micro_batch), tokens_N, temperature, max_logits=max_logits)


def token_logprobs(
    head: nn.Linear, hidden_NH: Tensor, tokens_N: Tensor, temperature: float, *, max_logits: int
) -> tuple[Tensor, Tensor]:
    """`(logprobs_N, entropy_N)` of tokens after these hidden states, chunk by chunk; see `trained_logprobs`."""
    rows = max(1, max_logits // head.out_features)
    chunked = zip(hidden_NH.split(rows), tokens_N.split(rows), strict=True)
    if len(tokens_N) <= rows or not torch.is_grad_enabled():
        chunks = [_token_logprobs(head, h, t, temperature) for h, t in chunked]
    else:
        chunks = [checkpoint(_token_logprobs, head, h, t, temperature, use_reentrant=False) for h, t in chunked]
    logprobs, entropies = zip(*chunks, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def score(model: PreTrainedModel, micro_batches: Iterable[MicroBatch], temperature: float) -> list[tuple[float, ...]]:
    """Per sample, in order, one logprob per completion token, 0.0 where not trained. Without gradient."""
    device = next(model.parameters()).device
    rows: list[tuple[float, ...]] = []
    for micro_batch in micro_batches:
        with torch.inference_mode():
            logprobs_N, _ = trained_logprobs(model, micro_batch.to(device), temperature)
        all_ST = torch.zeros(micro_batch.completions_ST.shape)
        all_ST.view(-1)[micro_batch.trained_N] = logprobs_N.cpu()
        lengths = micro_batch.completion_lengths_S.tolist()
        rows += [tuple(row[:length]) for row, length in zip(all_ST.tolist(), lengths, strict=True)]
    return rows


def hidden_states(model: PreTrainedModel, mb: MicroBatch) -> Tensor:
    """The last hidden state *before* each trained token, `(N, H)`, from which its logits are computed.

    Raises `ModelError` if the model's sliding window is shorter than prompt and completion together.
    """
    (P, L), (S, T) = mb.prompts_PL.shape, mb.completions_ST.shape
    window = getattr(model.config.get_text_config(), "sliding_window", None)
    if window is not None and window < L + T:
        raise ModelError(
            f"the model attends to a sliding window of {window} tokens, and a sample has up to {L + T}: "
            "shared prompts cannot be trained past the window; lower the length limits or take another model"
        )
    device = mb.prompts_PL.device
    cache = prompt_cache()
    # Padding is on the right, where causality alone hides it from real tokens: no mask.
    prompts_PLH = model.base_model(input_ids=mb.prompts_PL, past_key_values=cache, use_cache=True).last_hidden_state
    before_PH = prompts_PLH[torch.arange(P, device=device), mb.prompt_lengths_P - 1]
    lengths_S = mb.prompt_lengths_P[mb.prompt_of_S]
    is_prompt_SL = torch.arange(L, device=device) < lengths_S[:, None]
    # No token follows the last one, so it is left out. A lone token stays: all ranks must make the same passes.
    num_run = max(1, T - 1)
    after_STH = model.base_model(
        input_ids=mb.completions_ST[:, :num_run],
        attention_mask=torch.cat([is_prompt_SL, is_prompt_SL.new_ones(S, num_run)], dim=1),
        position_ids=lengths_S[:, None] + torch.arange(num_run, device=device),
        past_key_values=continued(cache, mb.prompt_of_S),
        use_cache=True,
    ).last_hidden_state
    hidden_STH = torch.cat([before_PH.index_select(0, mb.prompt_of_S)[:, None], after_STH], dim=1)[:, :T]
    return hidden_STH.flatten(0, 1).index_select(0, mb.trained_N)


def _token_logprobs(head: nn.Module, hidden_NH: Tensor, tokens_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logprobs_NV = (head(hidden_NH).float() / temperature).log_softmax(-1)
    with torch.no_grad():
        entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    return logprobs_NV.gather(1, tokens_N[:, None])[:, 0], entropy_N
