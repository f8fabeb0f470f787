"""Logprobs of trained tokens under a causal language model, from one row without padding that computes prefixes once.

The result and its gradient equal those of plain forwards over whole sequences. Logits exist only for trained tokens,
one chunk at a time.

Shape suffixes: as in `rlsys.batch.tensors`, and `V` vocabulary, `H` hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rlsys.batch.samples import Sample
from rlsys.batch.tensors import MicroBatch, pack_for_scoring
from rlsys.number_arrays import FloatArray
from rlsys.types import Distribution
from workers.model.context import ContextGroup
from workers.model.row_attention import AttentionRow, use_row_attention
from workers.model.token_distribution import OutputLayer, distribution_logits

MAX_LOGITS = 2**25
"""Logits alive at once (128 MiB in fp32). More are computed in chunks, and again in the backward pass."""
ENTROPY_COPIES = 2
"""Tensors of the size of the logits that the gradient of an entropy needs, in fp32."""
TRUNCATION_COPIES = 4
"""Tensors of the size of the logits that `cut_off` needs, in fp32."""


class Scorer(nn.Module):
    """`trained_logprobs` as one module, so that FSDP sees the two passes over the layers as one forward of its root."""

    def __init__(self, model: PreTrainedModel, context: ContextGroup | None = None) -> None:
        """`context` are the ranks that hold parts of each row, if any."""
        super().__init__()
        self.model = model
        self._context = context

    def forward(
        self, micro_batch: MicroBatch, distribution: Distribution, *, entropy_has_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        return trained_logprobs(
            self.model,
            micro_batch,
            distribution,
            context=self._context,
            entropy_has_gradient=entropy_has_gradient,
        )


def trained_logprobs(
    model: PreTrainedModel,
    micro_batch: MicroBatch,
    distribution: Distribution,
    *,
    max_logits: int = MAX_LOGITS,
    context: ContextGroup | None = None,
    entropy_has_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """`(logprobs_N, entropy_N)` of the trained tokens under the sampling distribution, in nats and fp32.

    The entropy is detached unless `entropy_has_gradient`. At most `max_logits` logits are alive at once, or those of
    one token. All ranks of `context` call it and get the whole result.
    """
    mb = micro_batch
    of_tokens = partial(
        token_logprobs,
        OutputLayer.of(model),
        distribution=distribution,
        max_logits=max_logits,
        entropy_has_gradient=entropy_has_gradient,
    )
    if context is None:
        return of_tokens(hidden_states(model, mb), mb.targets_N)
    mb = context.pad_row(mb)
    targets_M = mb.targets_N[context.own_tokens(mb)]
    logprobs_M, entropy_M = of_tokens(hidden_states(model, mb, context), targets_M)
    return context.gather_tokens(logprobs_M, mb), context.gather_tokens(entropy_M, mb)


def token_logprobs(
    output: OutputLayer,
    hidden_NH: Tensor,
    tokens_N: Tensor,
    distribution: Distribution,
    *,
    max_logits: int,
    entropy_has_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """`(logprobs_N, entropy_N)` of tokens after these hidden states, chunk by chunk; see `trained_logprobs`."""
    copies = (TRUNCATION_COPIES if distribution.is_truncated else 1) + ENTROPY_COPIES * entropy_has_gradient
    rows = max(1, max_logits // (copies * output.num_vocab))
    chunked = zip(hidden_NH.split(rows), tokens_N.split(rows), strict=True)
    if len(tokens_N) <= rows or not torch.is_grad_enabled():
        chunks = [_token_logprobs(output, h, t, distribution, entropy_has_gradient) for h, t in chunked]
    else:
        chunks = [
            checkpoint(_token_logprobs, output, h, t, distribution, entropy_has_gradient, use_reentrant=False)
            for h, t in chunked
        ]
    logprobs, entropies = zip(*chunks, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def score(
    model: PreTrainedModel, samples: Sequence[Sample], distribution: Distribution, *, max_tokens: int
) -> list[FloatArray]:
    """Per sample, one logprob per completion token in fp32, 0.0 where not trained. Without gradient.

    At most `max_tokens` tokens, or one sample, go through the model together.
    """
    device = next(model.parameters()).device
    rows = [np.zeros(len(sample.completion_ids), np.float32) for sample in samples]
    parts: list[tuple[list[int], list[int], Tensor]] = []  # on the device until all are computed
    for indices, micro_batch in pack_for_scoring(samples, max_tokens):
        with torch.inference_mode():
            logprobs_N, _ = trained_logprobs(model, micro_batch.to(device), distribution)
        parts.append((indices, micro_batch.num_trained_S.tolist(), logprobs_N))
    for indices, lengths, logprobs_N in parts:
        for index, own_N in zip(indices, logprobs_N.cpu().split(lengths), strict=True):
            rows[index][np.asarray(samples[index].is_trained)] = own_N.numpy()
    return [FloatArray.over(row) for row in rows]


def hidden_states(model: PreTrainedModel, mb: MicroBatch, context: ContextGroup | None = None) -> Tensor:
    """The last hidden state *before* each trained token, `(N, H)`, from which its logits are computed.

    With `context`, only those of this rank, and `mb` is padded for it.
    """
    row, before_N = AttentionRow.of(mb.until_R, mb.positions_R, context), mb.before_N
    row.routing_PW = mb.routing_RW if context is None or mb.routing_RW is None else context.own(mb.routing_RW)
    if context is None:
        return rows_of(row_states(model, mb.tokens_R, mb.positions_R, row), before_N)
    states_PH = row_states(model, context.own(mb.tokens_R), context.own(mb.positions_R), row)
    return rows_of(states_PH, before_N[context.own_tokens(mb)] % len(states_PH))


def row_states(model: PreTrainedModel, tokens_R: Tensor, positions_R: Tensor, row: AttentionRow) -> Tensor:
    """The last hidden state of each token of a row, `(R, H)`."""
    use_row_attention(model)
    hidden_1RH = model.base_model(
        input_ids=tokens_R[None],
        position_ids=positions_R[None],
        attention_mask=tokens_R.new_ones(1, 1, 1, 1),  # given, so that the model builds none
        row=row,
        use_cache=False,
    ).last_hidden_state
    return hidden_1RH[0]


def rows_of(states_RH: Tensor, indices_N: Tensor) -> Tensor:
    """Return rows of a matrix, `(N, H)`. On CUDA the gradient of `index_select` adds up those of a repeated row in any
    order; this adds them up in one."""
    return nn.functional.embedding(indices_N, states_RH)


def _token_logprobs(
    output: OutputLayer,
    hidden_NH: Tensor,
    tokens_N: Tensor,
    distribution: Distribution,
    entropy_has_gradient: bool,
) -> tuple[Tensor, Tensor]:
    logprobs_NV = distribution_logits(output.logits(hidden_NH), tokens_N, distribution).log_softmax(-1)
    with torch.set_grad_enabled(entropy_has_gradient and torch.is_grad_enabled()):
        finite_NV = logprobs_NV.masked_fill(logprobs_NV.isneginf(), 0.0) if distribution.is_truncated else logprobs_NV
        entropy_N = -(logprobs_NV.exp() * finite_NV).sum(-1)
    return logprobs_NV.gather(1, tokens_N[:, None])[:, 0], entropy_N
