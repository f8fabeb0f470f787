"""A vLLM server on this machine, as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.processes import free_port

START_S = 240.0
EXTENSION = ["--worker-extension-cls", "workers.engines.vllm.vllm_served.ServedWeights"]
ON_CPU = ["--enforce-eager", "--block-size", "32", "--no-enable-chunked-prefill", "--max-num-batched-tokens", "2048"]


@contextmanager
def vllm_server(
    model: Path | str, *more: str, context: int = 256, is_open: bool = True, processed: bool = True
) -> Iterator[str]:
    """Serve a model until the block ends; gives the address. `is_open`: it takes weights. `processed`: its logprobs are
    those of the distribution sampled from."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1"),
        *("--port", str(port), "--dtype", "float32", "--max-model-len", str(context), "--max-num-seqs", "16"),
        *("--generation-config", "vllm", *ON_CPU, *(EXTENSION if is_open else ())),
        *(("--logprobs-mode", "processed_logprobs") if processed else ()),
        *more,
    ]
    environment = {
        **os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR",
        **({"VLLM_SERVER_DEV_MODE": "1"} if is_open else {}),
    }  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        try:
            _wait_for(url, process)
            yield url
        finally:
            process.terminate()


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until the server answers; nothing notifies of that."""
    end = time.monotonic() + START_S
    while True:
        assert process.poll() is None, f"the server ended with {process.returncode}"
        assert time.monotonic() < end, f"no answer from {url} within {START_S:g} s"
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
