"""Layout of published tensors in a model's parameters: rectangles from strides, and sums over shards."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from rlsys.weight_sync.manifest import Rectangle, TensorSpec
from workers.engines.vllm.vllm_layout import PartSum, Placement, View, covers, part_sums, rectangle_of, sum_checksums
from workers.transport.checksums import checksum_of, spec_of

SPEC = TensorSpec("w", "float32", (6, 4))


def rectangles(num: int) -> Iterator[tuple[Tensor, Rectangle]]:
    """Made-up tensors and rectangles of them."""
    draw = random.Random(0)
    for _ in range(num):
        shape = tuple(draw.randint(1, 5) for _ in range(draw.randint(1, 4)))
        offset = tuple(draw.randrange(size) for size in shape)
        size = tuple(draw.randint(1, whole - start) for whole, start in zip(shape, offset, strict=True))
        tensor = torch.randn(shape)
        yield tensor, Rectangle(spec_of("w", tensor), offset, size)


def test_a_rectangle_is_known_by_the_strides_of_its_view() -> None:
    for tensor, rectangle in rectangles(500):
        view = tensor[rectangle.slices]
        assert rectangle_of(View.of(view), rectangle.tensor) == rectangle
        assert rectangle_of(View.of(view[None]), rectangle.tensor) == rectangle
    whole = torch.zeros(6, 4)
    assert rectangle_of(View.of(whole.view(-1)), SPEC) == rectangle_of(View.of(whole.view(2, 3, 4)), SPEC)
    assert rectangle_of(View.of(whole.view(-1)), SPEC) == Rectangle.whole(SPEC)


def test_a_view_in_another_order_is_no_rectangle() -> None:
    whole = torch.zeros(6, 4)
    for view in (whole.t(), whole[::2], whole[:, ::3], whole.view(4, 6)[:, :5], whole[0].expand(3, 4)):
        assert rectangle_of(View.of(view), SPEC) is None


def test_a_view_of_a_part_of_the_memory_has_its_place_in_that_part() -> None:
    memory = torch.zeros(100)
    whole = memory[10:34].view(6, 4)
    assert rectangle_of(View.of(whole[2:4, 1:], whole), SPEC) == Rectangle(SPEC, (2, 1), (2, 3))


def test_fused_and_sharded_parameters_sum_to_the_published_tensors() -> None:
    """As two shards have them: q and up in halves of their rows, k on both, o in halves of its columns."""
    published = {name: torch.randn(6, 4).bfloat16() for name in "qkuo"}
    specs = {name: spec_of(name, tensor) for name, tensor in published.items()}
    shards = []
    for rank in range(2):
        rows, columns = slice(3 * rank, 3 * rank + 3), slice(2 * rank, 2 * rank + 2)
        qk, up = torch.cat([published["q"][rows], published["k"]]), published["u"][rows]
        parameters = {"qk": qk.float(), "up": up.clone(), "o": published["o"][:, columns].clone()}
        half = {name: Rectangle(specs[name], (3 * rank, 0), (3, 4)) for name in "qu"}
        placements = [
            Placement(half["q"], "qk", (9, 4), View(0, (3, 4), (4, 1))),
            Placement(Rectangle.whole(specs["k"]), "qk", (9, 4), View(12, (6, 4), (4, 1))),
            Placement(half["u"], "up", (3, 4), View(0, (3, 4), (4, 1))),
            Placement(Rectangle(specs["o"], (0, 2 * rank), (6, 2)), "o", (6, 2), View(0, (6, 2), (2, 1))),
        ]
        shards.append(part_sums(placements, parameters, dict.fromkeys("qkuo", "bfloat16")))
    assert sum_checksums(shards, specs.values()) == {specs[name]: checksum_of(published[name]) for name in "qkuo"}


def test_a_parameter_in_another_form_is_left_out() -> None:
    placement = Placement(Rectangle.whole(SPEC), "p", (6, 4), View(0, (6, 4), (4, 1)))
    for form in (torch.zeros(8, 4), torch.zeros(4, 6).t()):
        assert part_sums([placement], {"p": form}, {"w": "float32"}) == []


@pytest.mark.parametrize(
    ("parts", "checksum"),
    [
        ([((0, 0), (6, 4), 5)], 5),
        ([((0, 0), (3, 4), 5), ((3, 0), (3, 4), 2**64 - 1)], 4),
        ([((0, 0), (6, 4), 5), ((0, 0), (6, 4), 5)], 5),
        ([((0, 0), (6, 4), 5), ((0, 0), (6, 4), 7)], 12),
        ([((0, 0), (3, 4), 5)], None),
        ([((0, 0), (6, 4), 5), ((0, 0), (3, 4), 5)], None),
        ([((0, 0), (4, 4), 5), ((2, 0), (2, 4), 5)], None),
        ([], None),
    ],
    ids=["whole", "halves", "copies", "copies that differ", "a gap", "too much", "overlap and gap", "nothing"],
)
def test_copies_count_once_and_only_whole_tensors_count(
    parts: list[tuple[tuple[int, ...], tuple[int, ...], int]], checksum: int | None
) -> None:
    shards = [[PartSum("w", *part)] for part in parts]
    assert sum_checksums(shards, [SPEC]) == ({} if checksum is None else {SPEC: checksum})


def test_tensors_without_dimensions_or_elements_are_covered() -> None:
    scalar, empty = TensorSpec("s", "float32", ()), TensorSpec("e", "float32", (0, 4))
    assert covers([Rectangle.whole(scalar)], scalar)
    assert rectangle_of(View.of(torch.tensor(1.0)), scalar) == Rectangle.whole(scalar)
    assert covers([], empty)
