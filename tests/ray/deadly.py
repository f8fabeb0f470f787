"""An algorithm that ends a rank in the middle of a step."""

from __future__ import annotations

import os
from pathlib import Path
from signal import SIGKILL

from pydantic.dataclasses import dataclass

from algorithms.corrections import Policies
from algorithms.fields import RULES
from algorithms.grpo import GRPO
from rlsys.algorithm import LossOutput


@dataclass(frozen=True, kw_only=True, config=RULES)
class Deadly(GRPO):
    """GRPO whose rank 1 kills its process while rank 0 waits for it in a collective, once the pipe `order` exists."""

    order: str

    def surrogate(self, policies: Policies) -> LossOutput:
        from torch.distributed import barrier, get_rank

        order = Path(self.order)
        if order.exists() and get_rank() == 0:
            order.write_bytes(b"about to wait")
            barrier()
        elif order.exists():
            order.read_bytes()
            order.unlink()
            os.kill(os.getpid(), SIGKILL)
        return super().surrogate(policies)
