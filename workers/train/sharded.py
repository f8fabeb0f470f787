"""A model in training over ranks, policy or critic: sharded with FSDP2, stepped with AdamW, saved and loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rlsys.errors import CheckpointError, OutOfMemory, TrainingError
from rlsys.stabilizer import GradientDecision, Stabilizer
from rlsys.util.any_paths import AnyPath
from workers.model.model_tensors import local, persistent_buffers
from workers.model.moving_memory import MovingMemory
from workers.train.adapter_state import PART, check_saved
from workers.train.layout import RankLayout
from workers.train.optimizer import (
    AdamUpdates,
    OptimizerSettings,
    adamw,
    clip,
    learning_rate,
    local_gradients,
    squared_norms,
    trained_parameters,
)
from workers.train.state_files import StateWriter, Writing, load_state, saved_shapes
from workers.train.step_data import Part, RankStep

BUFFERS, REFERENCE = "buffers", "reference"
"""Parts of a checkpoint with the persistent buffers, and with the weights of a reference that follows the policy."""


class Sharded:
    """One rank of a model in training: trained weights and AdamW state in fp32; the model computes in `dtype`.

    Frozen weights have no gradient and no state, and are neither saved nor loaded; nor are the buffers of a frozen
    base.

    Its methods and those of its subclasses are collective, unless noted otherwise: all ranks call them, in the same
    order.
    """

    def __init__(
        self,
        module: nn.Module,
        root: nn.Module,
        settings: OptimizerSettings,
        layout: RankLayout,
        adapter: Mapping[str, Tensor] | None = None,
    ) -> None:
        """`module` names the parameters. `root` is the module that is called; it has no other parameters.

        `layout` is applied to `root`. `adapter` has the facts of the adapter (`facts_of`), None if the module has none.
        """
        self._module, self._root, self._settings = module, root, settings
        self._layout, self._adapter = layout, adapter
        self._ranks, self._device, self.dtype = layout.ranks, layout.device, layout.dtype
        self._optimizer = adamw(module, settings)
        self._step = torch.zeros((), dtype=torch.int64)
        self._counted = {name for name, parameter in self.parameters().items() if layout.counts(parameter)}
        """Parameters of which this rank's part counts in sums over ranks."""
        self._state_writer = StateWriter(self._ranks, layout.state_device)
        self._memory = MovingMemory(self._device)
        self.num_passes = 0
        """Forward passes that were begun, each of a micro-batch."""
        root.register_forward_pre_hook(self._count_pass)
        self.wait_published: Callable[[], None] = lambda: None
        """Returns once the weights may change, because those of the last publish are copied."""

    @property
    def step(self) -> int:
        """Train steps behind the weights, which is their version; kept by `save` and `load`. A step may have several
        updates."""
        return int(self._step)

    def lr(self, staleness: float) -> float:
        """Learning rate of the next step, whose tokens are so many versions old on average."""
        return learning_rate(self.step, self._settings, staleness)

    def _count_pass(self, *_: object) -> None:
        self.num_passes += 1

    def parameters(self) -> dict[str, nn.Parameter]:
        """Live trained parameters by name, tied ones once; those of a sharded model are `DTensor`s."""
        return trained_parameters(self._module)

    def shards(self) -> dict[str, Tensor]:
        """This rank's live shard of every trained parameter, for `StabilizerPlugin.start`. Not collective."""
        return {name: local(parameter.detach()) for name, parameter in self.parameters().items()}

    def train(
        self,
        step: RankStep,
        updates: Iterable[Iterable[Part]],
        accumulate: Callable[[Part], Tensor],
        stabilizer: Stabilizer | None = None,
        *,
        what: str = "",
    ) -> dict[str, float]:
        """Take all updates of a step, and return their means. Does not count the step: see `end_step`.

        `accumulate` adds the gradient of one micro-batch and returns its share of the update's loss. Errors call an
        update `what` and its name. A metric of the stabilizer is averaged over the updates that report it.
        """
        reported: dict[str, list[float]] = {}
        for index, parts in enumerate(updates):
            self._optimizer.zero_grad()
            loss = torch.zeros((), device=self._device)
            last = len(step.plan.updates[index % len(step.plan.updates)]) - 1
            part = None
            try:
                for place, part in enumerate(parts):
                    self._layout.begin_pass(self._root, is_last=place == last)
                    loss += accumulate(part)
            except torch.OutOfMemoryError as error:
                raise _lack_of_memory(what + step.update_name(index), part, index, error) from error
            name, staleness = what + step.update_name(index), step.plan.staleness
            for metric, figure in self.update(loss, name, index, stabilizer, staleness).items():
                reported.setdefault(metric, []).append(figure)
        return {name: fmean(figures) for name, figures in reported.items()}

    def end_step(self) -> None:
        """Count the step."""
        self._state_writer.wait_copied()
        self._step += 1

    def update(
        self, loss: Tensor, what: str, index: int, stabilizer: Stabilizer | None = None, staleness: float = 0.0
    ) -> dict[str, float]:
        """Take update number `index` of the step with the current gradients. `loss` is this rank's share of its loss;
        `staleness` is `RankPlan.staleness`.

        Returns `loss`, `grad_norm` (after the stabilizer, before clipping) and the stabilizer's metrics.
        Raises `TrainingError`, which calls the update `what`, on all ranks and before any change, if the loss or the
        gradient's norm is not finite. A stabilizer never gets such a gradient.
        """
        self.wait_copied()
        gradients, all_reduce = local_gradients(self._module), self._sum
        total, squares = self._ranks.sum(loss.double()).item(), all_reduce(squared_norms(gradients)).item()
        _check_finite({"loss": total, "grad_norm": squares}, what, index)
        steered = stabilizer.steer(gradients, squares, all_reduce, staleness) if stabilizer else GradientDecision()
        if steered.is_edited:
            squares = all_reduce(squared_norms(gradients)).item()
            _check_finite({f"grad_norm after {type(stabilizer).__name__}": squares}, what, index)
        norm = math.sqrt(squares)
        figures = {"loss": total, "grad_norm": norm, **steered.metrics}
        if steered.is_skipped:
            return figures
        clip(gradients, norm, self._settings.clip_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = self.lr(staleness)
        if stabilizer:
            figures |= stabilizer.correct(AdamUpdates(self.parameters(), self._optimizer), all_reduce)
        self._optimizer.step()
        return figures

    def _sum(self, figures: Mapping[str, Tensor]) -> Tensor:
        """Sum figures of this rank's shards over parameters and ranks: an `AllReduce`."""
        own = [figure if name in self._counted else torch.zeros_like(figure) for name, figure in figures.items()]
        total = torch.stack(own).double().sum(0) if own else torch.zeros((), dtype=torch.float64, device=self._device)
        return self._ranks.sum_over_ranks(total)

    def wait_copied(self) -> None:
        """Return once the weights may change: those of the last checkpoint and of the last publish are copied."""
        self._state_writer.wait_copied()
        self.wait_published()

    def reshard(self) -> None:
        """Drop gathered weights, which a forward keeps for its backward: else parameters are not the optimizer's."""
        for module in self._root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @property
    def is_on_gpu(self) -> bool:
        """True if this rank computes on a GPU, and not on the CPU in the name of one."""
        return self._device.type == "cuda"

    def move_out(self, stabilizer: Stabilizer | None = None, *, moves_state: bool) -> None:
        """Free gradients and gathered weights. With `moves_state`, move weights, optimizer and the state of the
        stabilizer from this rank's device to the host, until `move_in`. Not collective."""
        self.wait_copied()
        self._optimizer.zero_grad()
        self.reshard()
        if moves_state:
            state = stabilizer.state_dict() if stabilizer else {}
            self._memory.move_out([*self._resident(), *state.values()])

    def move_in(self) -> None:
        """Undo `move_out`. Not collective."""
        self._memory.move_in()

    def _resident(self) -> Iterator[Tensor]:
        """Yield what stays on the device between two steps."""
        yield from self._module.parameters()
        yield from self._module.buffers()
        for state in self._optimizer.state.values():
            yield from state.values()

    def save(self, folder: AnyPath, stabilizer: Stabilizer | None = None) -> Writing:
        """Save weights, optimizer, step and stabilizer state; each rank writes its share.

        A step may begin at once: its update waits until all is copied.
        """
        state = self._state()
        if stabilizer:
            state["stabilizer"] = _as_sharded(stabilizer.state_dict(), self.parameters())
        return self._state_writer.save(state, folder)

    def load(self, folder: AnyPath, stabilizer: Stabilizer | None = None) -> None:
        """Restore a checkpoint from any number of ranks, bit for bit.

        A stabilizer without state in the checkpoint stays as it is; state without a stabilizer is ignored. Raises
        `CheckpointError`, also for another stabilizer's state, and for that of another adapter.
        """
        self.wait_copied()
        state, live = self._state(), stabilizer.state_dict() if stabilizer else {}
        check_saved(folder, self.parameters(), self._adapter, num_ranks=self._ranks.num_ranks)
        saved = saved_shapes(folder, "stabilizer").keys() if stabilizer else set[str]()
        if saved:
            if differing := saved ^ live.keys():
                raise CheckpointError(
                    f"{folder} contains the state of another stabilizer; they differ in {len(differing)} tensors, as "
                    f"{min(differing)!r}: go on with the one it was saved with, or with `stabilizer: null`"
                )
            state["stabilizer"] = _as_sharded(live, self.parameters())
        self._read(state, folder)
        if stabilizer and saved:
            stabilizer.load_state_dict(live)

    def load_weights(self, folder: AnyPath) -> None:
        """Restore only the trained weights and the buffers of a checkpoint. Raises `CheckpointError` as `load`."""
        check_saved(folder, self.parameters(), self._adapter, num_ranks=self._ranks.num_ranks)
        self._read(self._weights(), folder)

    def _read(self, state: Mapping[str, Mapping[str, Tensor]], folder: AnyPath) -> None:
        """Read into live tensors. Without buffers in the checkpoint, those of the model's files stay: no step changes
        them. So does a reference, which begins to follow the policy then."""
        absent = [part for part in (BUFFERS, REFERENCE) if part in state and not saved_shapes(folder, part)]
        wanted = {part: tensors for part, tensors in state.items() if part not in absent}
        load_state(wanted, folder, num_ranks=self._ranks.num_ranks)

    def _weights(self) -> dict[str, Mapping[str, Tensor]]:
        """Live weights and buffers by name, without copies."""
        return {"model": {**self.parameters()}, BUFFERS: {} if self._adapter else persistent_buffers(self._module)}

    def _state(self) -> dict[str, Mapping[str, Tensor]]:
        """Live tensors by name, without copies: weights, buffers, each weight's optimizer state, and the step."""
        optimizer = {f"optimizer.{name}": self._optimizer.state[p] for name, p in self.parameters().items()}
        adapter = {PART: self._adapter} if self._adapter else {}
        return {**self._weights(), **optimizer, "progress": {"step": self._step}, **adapter}


def _lack_of_memory(what: str, part: Part | None, index: int, error: torch.OutOfMemoryError) -> OutOfMemory:
    """Tell the composition of the micro-batch, None for one that is not built yet, and the remedies."""
    row = ""
    if part is not None:
        batch = part.batch
        row = (
            f" in or after a row of {len(batch.tokens_R)} positions ({len(batch.num_trained_S)} samples, "
            f"{len(batch.targets_N)} trained tokens)"
        )
    return OutOfMemory(
        f"{what}: out of memory{row}, and nothing of the update was stepped. `rlsys plan` shows what takes the memory, "
        "and the nearest settings that fit, of train.micro_batch_tokens, train.activation_checkpointing, "
        f"train.offload and train.mesh. {error}",
        index,
    )


def _check_finite(figures: Mapping[str, float], what: str, index: int) -> None:
    for name, figure in figures.items():
        if not math.isfinite(figure):
            raise TrainingError(
                f"{what}: {name} is {figure}, and nothing of it was stepped. If rewards and logprobs are finite, lower "
                "the learning rate, or train in float32 if this was bfloat16",
                index,
            )


def _as_sharded(tensors: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The same memory; tensors named after a parameter become shards of a whole, sharded like the parameter."""
    return {name: _like(tensor, parameters.get(name)) for name, tensor in tensors.items()}


def _like(tensor: Tensor, parameter: Tensor | None) -> Tensor:
    if not isinstance(parameter, DTensor):
        return tensor
    return DTensor(tensor, parameter._spec, requires_grad=False)  # `from_local` may copy to the device of the mesh
