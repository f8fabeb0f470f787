"""Every family that people train: loaded, trained, sampled with the local engine, exported; and all logprobs agree."""

from __future__ import annotations
