"""Cost of the trainer's forward and backward with compiled layers, and of attention over a row by back-end, on a CPU.

    python -m benchmarks.compiled [--quick | --short]

The policy of `examples.sort`, and SmolLM2-135M's sizes with random weights, in fp32 on one thread; CPU time. Each
repeat has another row, and takes it in all ways in turn.

| figure | meaning |
| --- | --- |
| `plain_s`, `compiled_s` | forward and backward of one micro-batch: as it is, and with `torch.compile` of each |
| | decoder layer (dynamic shapes), except attention, which is no graph |
| `compile_s` | what compiling takes, without caches: their first two micro-batches, less the same as they are |
| `compiled_over_plain` | time of the compiled layers over that of the others, without compiling |
| `of_50_steps` | the same over 50 steps of the example, with compiling |
| `attention_s` | attention of one layer over such a row, forward and backward: `blocks` as the trainer has it, and |
| | PyTorch's `flash` and `math` over the whole row with a mask |
| `over_blocks` | time of these over that of `blocks` |
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import TYPE_CHECKING

from benchmarks.measure import Size, in_fresh_process, in_turn, parser_of, print_result, ratios, sorter, spread, spreads
from benchmarks.packed_rows import log_normal_samples, random_model

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from rlsys.batch.tensors import MicroBatch

REPEATS = {"full": 9, "quick": 5, "short": 1}
STEPS = 50
MICRO_BATCHES = {"sort": 1, "smollm": 4}
"""Micro-batches of a step of the example."""
WAYS = ("plain", "compiled")
BACKENDS = ("blocks", "flash", "math")


def main() -> None:
    """Measure each model in a fresh process; print the result line."""
    size: Size = parser_of(__doc__, quick="five repeats instead of nine").parse_args().size
    names = ("sort",) if size == "short" else ("sort", "smollm")
    print_result({name: in_fresh_process("benchmarks.compiled:figures_of", name, size) for name in names})


def figures_of(name: str, size: Size) -> dict[str, object]:
    """Return all figures of one model."""
    import torch
    from transformers import AttentionInterface

    from workers.model.decoder_layers import decoder_layers
    from workers.model.row_attention import ROW_ATTENTION, row_attention

    AttentionInterface.register(ROW_ATTENTION, torch.compiler.disable(row_attention))
    torch.set_num_threads(1)
    torch.compiler.config.force_disable_caches = True
    repeats = REPEATS[size]
    rows = [*_rows(name, repeats + 2)]
    models = {"plain": _model(name, size)}
    models["compiled"] = deepcopy(models["plain"])
    for layer in decoder_layers(models["compiled"]):
        layer.compile(dynamic=True, backend="aot_eager" if size == "short" else "inductor")
    first = {
        way: sum(_seconds(lambda m=model, r=row: _train(m, r)) for row in rows[:2]) for way, model in models.items()
    }

    def run(repeat: int, way: str) -> dict[str, float]:
        return {"s": _seconds(lambda: _train(models[way], rows[2 + repeat]))}

    runs = in_turn(repeats, WAYS, run)
    plain, compiled = (spread([run["s"] for run in runs[way]]) for way in WAYS)
    num = STEPS * MICRO_BATCHES[name]
    compile_s = first["compiled"] - first["plain"]
    attention = in_turn(
        repeats, BACKENDS, lambda repeat, how: {"s": _attention(models["plain"], rows[2 + repeat], how)}
    )
    return {
        "positions": spread([float(len(row.tokens_R)) for row in rows]),
        "plain_s": plain,
        "compiled_s": compiled,
        "compile_s": compile_s,
        "compiled_over_plain": ratios(runs["compiled"], runs["plain"], "s"),
        "of_50_steps": (compile_s + num * compiled["median"]) / (num * plain["median"]),
        "attention_s": {how: spreads(each)["s"] for how, each in attention.items()},
        "over_blocks": {how: ratios(each, attention["blocks"], "s") for how, each in attention.items()},
    }


def _seconds(run: Callable[[], object]) -> float:
    """CPU time of this process and of the compilers that it waited for."""
    began, before = time.process_time(), os.times()
    run()
    after = os.times()
    children = after.children_user + after.children_system - before.children_user - before.children_system
    return time.process_time() - began + children


def _model(name: str, size: Size) -> PreTrainedModel:
    if name == "smollm":
        return random_model(30).eval()
    import torch

    from workers.model.model_loading import load_model

    return load_model(str(sorter(size) / "model"), torch.float32).eval()


def _rows(name: str, count: int) -> Iterator[MicroBatch]:
    """Yield micro-batches as the example has: a step of 32 groups of `sort`, or two groups of SmolLM2's eight."""
    from rlsys.batch.samples import Sample
    from rlsys.batch.tensors import MicroBatch
    from rlsys.types import VersionSpan

    rng = random.Random(0)
    for _ in range(count):
        if name == "smollm":
            yield MicroBatch.of([sample for _ in range(2) for sample in log_normal_samples(rng, 60, 0.9)])
            continue
        samples = []
        for _ in range(32):
            prompt = tuple(rng.randrange(2, 12) for _ in range(8))
            for _ in range(8):
                ids = tuple(rng.randrange(2, 12) for _ in range(rng.randint(5, 7)))
                spans = (VersionSpan(0, len(ids)),)
                samples.append(Sample(prompt, ids, (True,) * len(ids), (-2.0,) * len(ids), spans))
        yield MicroBatch.of(samples)


def _train(model: PreTrainedModel, row: MicroBatch) -> None:
    """Forward and backward of a micro-batch."""
    from rlsys.types import Distribution
    from workers.model.logprobs import trained_logprobs

    trained_logprobs(model, row, Distribution(1.0))[0].sum().backward()


def _attention(model: PreTrainedModel, row: MicroBatch, how: str) -> float:
    """CPU seconds of one layer's attention, forward and backward."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    from workers.model.row_attention import AttentionRow, row_attention

    text, num = model.config.get_text_config(), len(row.tokens_R)
    torch.manual_seed(0)
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = (text.num_attention_heads, text.num_key_value_heads, text.num_key_value_heads)
    query, key, value = (torch.randn(1, count, num, width, requires_grad=True) for count in heads)
    rule = AttentionRow.of(row.until_R, row.positions_R)
    place_R = torch.arange(num)
    mask_RR = (place_R <= place_R[:, None]) & (place_R[:, None] < row.until_R)

    def attended() -> Tensor:
        if how == "blocks":
            return row_attention(model, query, key, value, None, scaling=width**-0.5, row=rule)[0]
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION if how == "flash" else SDPBackend.MATH):
            return scaled_dot_product_attention(
                query, key, value, attn_mask=mask_RR, scale=width**-0.5, enable_gqa=True
            )

    rule.blocks(None)  # once for all layers
    return _seconds(lambda: attended().sum().backward())


if __name__ == "__main__":
    main()
