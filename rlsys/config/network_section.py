"""The key `train.network`: where the ranks of a model meet."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from rlsys.config.section import Section

Port = Annotated[int, Field(ge=1, le=65535)]


class NetworkSection(Section):
    """Network of the ranks of actor and critic on several machines. GLOO_ and NCCL_ variables of the driver hold for
    them too."""

    interface: Annotated[str, Field(min_length=1, max_length=15)] | None = None
    """Network interface for their collectives, the same on every machine: `eth1`. None: on each machine the one with
    the address that Ray knows it by."""
    ports: tuple[Port, Port] | None = None
    """First and last port that they may meet at, on the machine of rank 0, where a firewall allows only some: [29500,
    29520]. Their later connections take ports from the system's range (ip_local_port_range). None: any."""

    @field_validator("ports")
    @classmethod
    def _in_order(cls, ports: tuple[int, int] | None) -> tuple[int, int] | None:
        if ports is not None and ports[0] > ports[1]:
            raise ValueError(f"should be the first and the last port, in this order (got {list(ports)})")
        return ports
