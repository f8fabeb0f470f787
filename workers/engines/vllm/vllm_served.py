"""Extension of the workers of a vLLM server that rlsys samples from: new weights from files, and checksums as JSON.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --worker-extension-cls workers.engines.vllm.vllm_served.ServedWeights ...

The server's `/collective_rpc` passes JSON alone, so these methods take and return JSON. Whoever reaches that address
can change the weights, and vLLM asks no key for it: keep it in a trusted network.
"""

from __future__ import annotations

import json

from rlsys.weight_sync.manifest import TensorSpec
from workers.engines.vllm.vllm_weights import WeightLoading
from workers.model.model_loading import read_config


class ServedWeights(WeightLoading):
    """`WeightLoading` for calls over HTTP."""

    rlsys_num_loads = 0
    """Times that the weights were changed since the server started."""

    def rlsys_served_loads(self) -> dict[str, int]:
        """Tell `rlsys_num_loads`; that there is an answer tells that the server has this extension."""
        return {"loads": self.rlsys_num_loads}

    def rlsys_served_limit_ids(self, num_ids: str) -> None:
        """See `WeightLoading.rlsys_limit_ids`."""
        self.rlsys_limit_ids(int(num_ids))

    def rlsys_served_stage(self, path: str, specs: str) -> None:
        """Lay out the tensors of a safetensors file beside those in use; `specs` is JSON of the names, dtypes and
        shapes that were published. The server decodes nothing meanwhile."""
        from safetensors.torch import load_file

        published = [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in json.loads(specs)]
        self.rlsys_prepare(published, read_config(self.vllm_config.model_config.model))
        self.rlsys_stage(load_file(path))

    def rlsys_served_swap(self) -> None:
        """Switch to the staged weights."""
        self.rlsys_swap()
        self.rlsys_num_loads += 1

    def rlsys_served_sums(self, dtypes: str) -> list[list[object]]:
        """Checksums of this shard's parts, cast to `dtypes`, JSON by name; see `WeightLoading.rlsys_checksums`."""
        self.rlsys_read_back()
        sums = self.rlsys_checksums(json.loads(dtypes))
        return [[part.name, list(part.offset), list(part.shape), part.checksum] for part in sums]
