"""Where a stabilizer stands in a step, what it is shown of the optimizer, and how its state is saved."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

from rlsys.errors import CheckpointError, TrainingError
from rlsys.stabilizer import GradientDecision, Updates
from rlsys.types import Distribution
from tests.training import PLAIN, SETTINGS, JoinedRanks, data_of, differing, everything_in, planned
from workers.model.model_loading import CPU
from workers.train.fsdp import FsdpBackend
from workers.train.layout import RankLayout
from workers.train.optimizer import CPU_PIECE, AdamUpdates, OptimizerSettings, adamw
from workers.train.rank_group import RankGroup
from workers.train.sharded import Sharded

if TYPE_CHECKING:
    from rlsys.stabilizer import AllReduce, Gradients


class Quiet:
    """Looks and does nothing."""

    synchronous_steps_left = 0

    def end_step(self) -> None:
        pass

    def steer(
        self, gradients: Gradients, squared_norm: float, all_reduce: AllReduce, staleness: float
    ) -> GradientDecision:
        return GradientDecision()

    def correct(self, updates: Updates, all_reduce: AllReduce) -> Mapping[str, float]:
        return {}

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        assert not state


class Halve(Quiet):
    """Halves gradients, and counts their elements over all ranks."""

    def steer(
        self, gradients: Gradients, squared_norm: float, all_reduce: AllReduce, staleness: float
    ) -> GradientDecision:
        for gradient in gradients.values():
            gradient.mul_(0.5)
        count = all_reduce({name: torch.tensor(g.numel()) for name, g in gradients.items()}).item()
        return GradientDecision(is_edited=True, metrics={"stabilizer/elements": count})


def directions(updates: Updates) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Of every parameter, flat: that of this update, and that of the one before."""
    now: dict[str, Tensor] = {}
    before: dict[str, Tensor] = {}
    for piece in updates.pieces():
        now[piece.name] = torch.cat([now.get(piece.name, torch.zeros(0)), piece.now()])
        before[piece.name] = torch.cat([before.get(piece.name, torch.zeros(0)), piece.before()])
    return now, before


class Foresee(Quiet):
    """Keeps what it is told the optimizer is about to do to every shard, and did before."""

    def __init__(self) -> None:
        self.now: dict[str, Tensor] = {}
        self.before: dict[str, Tensor] = {}

    def correct(self, updates: Updates, all_reduce: AllReduce) -> Mapping[str, float]:
        self.now, self.before = directions(updates)
        return {"stabilizer/corrected": 1.0}


class SkipOdd(Quiet):
    """Leaves out every other update, the first one of them."""

    def __init__(self) -> None:
        self.num_seen = self.num_corrected = 0

    def steer(
        self, gradients: Gradients, squared_norm: float, all_reduce: AllReduce, staleness: float
    ) -> GradientDecision:
        self.num_seen += 1
        return GradientDecision(is_skipped=self.num_seen % 2 == 1, metrics={"stabilizer/seen": self.num_seen})

    def correct(self, updates: Updates, all_reduce: AllReduce) -> Mapping[str, float]:
        self.num_corrected += 1
        return {"stabilizer/corrected": self.num_corrected}


class Remember(Quiet):
    """Keeps the last gradient, and how many there were."""

    def __init__(self, shapes: Mapping[str, Tensor]) -> None:
        self.last = {name: torch.zeros_like(shard) for name, shard in shapes.items()}
        self.num_seen = torch.zeros((), dtype=torch.int64)

    def steer(
        self, gradients: Gradients, squared_norm: float, all_reduce: AllReduce, staleness: float
    ) -> GradientDecision:
        for name, gradient in gradients.items():
            self.last[name].copy_(gradient)
        self.num_seen += 1
        return GradientDecision()

    def state_dict(self) -> dict[str, Tensor]:
        return {**self.last, "num_seen": self.num_seen}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])


def backend_of(model_path: str, ranks: RankGroup) -> FsdpBackend:
    return FsdpBackend(model_path, SETTINGS, ranks)


def train_step(
    backend: FsdpBackend, ranks: RankGroup, stabilizer: Quiet | None, num_updates: int = 1
) -> dict[str, float]:
    plan, payloads = planned(backend.step, ranks.num_ranks, PLAIN, num_updates)
    mine = plan[ranks.rank]
    return backend.train_step(mine, data_of(payloads), PLAIN, distribution=Distribution(0.9), stabilizer=stabilizer)


def halved(model_path: str, ranks: RankGroup) -> dict[str, float]:
    return train_step(backend_of(model_path, ranks), ranks, Halve())


def test_a_stabilizer_edits_every_shard_before_clipping(model_path: str, two_ranks: JoinedRanks) -> None:
    backend = backend_of(model_path, RankGroup())
    plain = train_step(backend, RankGroup(), None)
    for metrics in (*two_ranks(halved, model_path), halved(model_path, RankGroup())):
        assert metrics["optim/grad_norm"] == pytest.approx(plain["optim/grad_norm"] / 2, rel=1e-4)
        assert metrics["stabilizer/elements"] == sum(w.numel() for w in backend.full_weights(torch.float32).values())


def foreseen(model_path: str, ranks: RankGroup) -> float:
    """The largest difference between what it was told and what became of this rank's shards, in learning rates."""
    backend, stabilizer, worst = backend_of(model_path, ranks), Foresee(), 0.0
    previous: dict[str, Tensor] = {}
    for _ in range(3):
        shards = {name: shard.clone() for name, shard in backend.shards().items()}
        metrics = train_step(backend, ranks, stabilizer)
        assert metrics["stabilizer/corrected"] == 1
        lr = metrics["optim/lr"]
        for name, shard in backend.shards().items():
            expected = shards[name] * (1 - lr * SETTINGS.weight_decay) - lr * stabilizer.now[name].view_as(shard)
            worst = max([worst, *((shard - expected).abs() / lr).flatten().tolist()])
            before = previous.get(name, torch.zeros_like(shard).flatten())
            torch.testing.assert_close(stabilizer.before[name], before, rtol=1e-5, atol=1e-6)
        previous = stabilizer.now
    return worst


def test_it_foresees_the_clipped_update_and_knows_the_one_before(model_path: str, two_ranks: JoinedRanks) -> None:
    """To what fp32 weights can tell: they are about 1, and a learning rate is a hundredth of that."""
    assert max(foreseen(model_path, RankGroup()), *two_ranks(foreseen, model_path)) < 1e-4


def test_the_foreseen_update_is_adamws_to_a_millionth() -> None:
    """From weights of 0, so that they hold nothing but the update."""
    settings = OptimizerSettings(lr=1e-3, betas=(0.9, 0.999), total_steps=1)
    module, generator = nn.Linear(50, 40), torch.Generator().manual_seed(0)
    optimizer, last = adamw(module, settings), {}
    for step in range(40):
        for parameter in module.parameters():
            nn.init.zeros_(parameter)
            parameter.grad = torch.randn(parameter.shape, generator=generator) * 10 ** (step % 5 - 2)
        now, before = directions(AdamUpdates(dict(module.named_parameters()), optimizer))
        for name, expected in last.items():
            torch.testing.assert_close(before[name], expected, rtol=1e-6, atol=0)
        last = now
        optimizer.step()
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(
                parameter.detach(), -settings.lr * last[name].view_as(parameter), rtol=1e-6, atol=1e-12
            )


def test_additions_to_an_update_are_in_the_optimizers_units() -> None:
    settings = OptimizerSettings(lr=0.1, weight_decay=0.5, total_steps=1)
    module = nn.Linear(3, 2)
    start = module.weight.detach().clone()
    optimizer = adamw(module, settings)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    more = torch.tensor([1.0, 2.0, 3.0] * 2)
    (piece,) = [p for p in AdamUpdates(dict(module.named_parameters()), optimizer).pieces() if p.name == "weight"]
    direction = (piece.now() + more).view(2, 3)
    piece.add(more, 1.0)
    optimizer.step()
    torch.testing.assert_close(module.weight.detach(), start * (1 - 0.1 * 0.5) - 0.1 * direction)


def test_pieces_of_a_large_parameter_are_added_in_place() -> None:
    module = nn.Linear(2 * CPU_PIECE // 64 + 3, 64, bias=False)
    optimizer = adamw(module, OptimizerSettings(lr=0.1, weight_decay=0.0, total_steps=1))
    start = module.weight.detach().clone()
    module.weight.grad = torch.zeros_like(start)
    pieces = list(AdamUpdates(dict(module.named_parameters()), optimizer).pieces())
    assert [piece.now().numel() for piece in pieces] == [CPU_PIECE, CPU_PIECE, 3 * 64]
    for value, piece in enumerate(pieces):
        piece.add(torch.full_like(piece.now(), value), 1.0)
    moved = ((start - module.weight.detach()) / 0.1).flatten()
    for value, of_piece in enumerate(moved.split(CPU_PIECE)):
        torch.testing.assert_close(of_piece, torch.full_like(of_piece, value), rtol=0, atol=1e-5)


class Refuses(Quiet):
    """Is never to see a gradient that is not finite; makes one where there is none."""

    def steer(
        self, gradients: Gradients, squared_norm: float, all_reduce: AllReduce, staleness: float
    ) -> GradientDecision:
        assert isfinite(squared_norm)
        next(iter(gradients.values())).fill_(torch.inf)
        return GradientDecision(is_edited=True)


@pytest.mark.parametrize(("is_broken", "what"), [(True, "grad_norm is nan"), (False, "grad_norm after Refuses is inf")])
def test_a_gradient_that_is_not_finite_is_never_stepped(is_broken: bool, what: str) -> None:
    module = nn.Linear(3, 2)
    sharded = Sharded(module, module, SETTINGS, RankLayout(RankGroup(), torch.float32, CPU))
    start = module.weight.detach().clone()
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan if is_broken else 1.0)
    with pytest.raises(TrainingError, match=what) as refusal:
        sharded.update(torch.tensor(1.0), "step 1", 2, Refuses())
    assert refusal.value.update == 2
    assert torch.equal(module.weight, start)


def skipped(model_path: str, folder: Path, ranks: RankGroup) -> dict[str, float]:
    backend, stabilizer = backend_of(model_path, ranks), SkipOdd()
    backend.save(folder / "fresh").wait()
    first = train_step(backend, ranks, stabilizer)
    backend.save(folder / "skipped").wait()
    assert backend.step == 1
    assert stabilizer.num_corrected == 0
    train_step(backend, ranks, stabilizer)
    backend.save(folder / "stepped").wait()
    assert stabilizer.num_corrected == 1
    return first


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_skip_leaves_weights_and_optimizer_bit_for_bit(
    num_ranks: int, model_path: str, two_ranks: JoinedRanks, tmp_path: Path
) -> None:
    if num_ranks == 1:
        metrics = skipped(model_path, tmp_path, RankGroup())
    else:
        metrics = two_ranks(skipped, model_path, tmp_path)[0]
    fresh, left, stepped = (everything_in(tmp_path / name) for name in ("fresh", "skipped", "stepped"))
    assert differing(fresh, left) == ["progress.step"]
    assert len(differing(left, stepped)) == len(left)
    assert metrics["optim/grad_norm"] > 0
    assert metrics["stabilizer/seen"] == 1
    assert "stabilizer/corrected" not in metrics


def test_stabilizer_metrics_are_means_over_the_updates_reporting_them(model_path: str) -> None:
    metrics = train_step(backend_of(model_path, RankGroup()), RankGroup(), SkipOdd(), num_updates=4)
    assert metrics["stabilizer/seen"] == 2.5
    assert metrics["stabilizer/corrected"] == 1.5


def remembered(model_path: str, load: Path | None, num_steps: int, save: Path, ranks: RankGroup) -> int:
    backend = backend_of(model_path, ranks)
    stabilizer = Remember(backend.shards())
    if load:
        backend.load(load, stabilizer)
    for _ in range(num_steps):
        train_step(backend, ranks, stabilizer)
    backend.save(save, stabilizer).wait()
    return int(stabilizer.num_seen)


def test_its_state_moves_between_numbers_of_ranks_with_the_weights(
    model_path: str, two_ranks: JoinedRanks, tmp_path: Path
) -> None:
    a, b, c, straight = (tmp_path / name for name in ("a", "b", "c", "straight"))
    assert two_ranks(remembered, model_path, None, 2, a) == [2, 2]
    assert remembered(model_path, a, 0, b, RankGroup()) == 2
    assert two_ranks(remembered, model_path, b, 0, c) == [2, 2]
    first, second, third = (everything_in(folder) for folder in (a, b, c))
    assert len([name for name in first if name.startswith("stabilizer.")]) == len(backend_weights(model_path)) + 1
    assert first["stabilizer.model.layers.0.mlp.up_proj.weight"].any()
    assert differing(first, second) == differing(first, third) == []
    two_ranks(remembered, model_path, None, 3, straight)
    resumed = tmp_path / "resumed"
    two_ranks(remembered, model_path, c, 1, resumed)
    assert differing(everything_in(straight), everything_in(resumed)) == []


def backend_weights(model_path: str) -> dict[str, Tensor]:
    return backend_of(model_path, RankGroup()).full_weights(torch.float32)


def test_checkpoints_load_with_and_without_stabilizer_state(model_path: str, tmp_path: Path) -> None:
    """A run that starts to have a stabilizer has a fresh one."""
    backend = backend_of(model_path, RankGroup())
    train_step(backend, RankGroup(), None)
    backend.save(tmp_path / "without").wait()
    backend.save(tmp_path / "with", Remember(backend.shards())).wait()
    for saved, stabilizer in (("with", None), ("without", Remember(backend.shards()))):
        other = backend_of(model_path, RankGroup())
        other.load(tmp_path / saved, stabilizer)
        assert other.step == 1
        assert differing(other.full_weights(torch.float32), backend.full_weights(torch.float32)) == []
        assert stabilizer is None or int(stabilizer.num_seen) == 0


def test_the_state_of_another_stabilizer_is_refused(model_path: str, tmp_path: Path) -> None:
    backend = backend_of(model_path, RankGroup())
    stabilizer = Remember(backend.shards())
    backend.save(tmp_path, stabilizer).wait()
    del stabilizer.last["model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"state of another stabilizer.*as 'model.norm.weight'.*stabilizer: null"):
        backend.load(tmp_path, stabilizer)
