"""A folder of a model may bring Python of its own: none of it runs."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree

import pytest
import torch

from rlsys.errors import ModelError
from workers.model.memory_counts import CountedModel
from workers.model.model_loading import CPU, load_base_model, load_model, load_tokenizer, supported_outline
from workers.text.tokenizer import TextTokenizer

CODE = 'from pathlib import Path\n\nPath(__file__).with_name("ran").touch()\n\n\nclass Own: pass\n'
AUTO_MAP = {
    "AutoConfig": "own.Own",
    "AutoModel": "own.Own",
    "AutoModelForCausalLM": "own.Own",
    "AutoTokenizer": ["own.Own", "own.Own"],
}
KERNELS = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")


@pytest.fixture
def folder(model_path: Path, tmp_path: Path) -> Path:
    """A model of a kind that the library has, whose files name a module beside them."""
    folder = Path(copytree(model_path, tmp_path / "model"))
    (folder / "own.py").write_text(CODE)
    for name in ("config.json", "tokenizer_config.json"):
        change(folder / name, auto_map=AUTO_MAP)
    return folder


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_model_of_a_known_kind_is_read_without_its_code(folder: Path) -> None:
    path = str(folder)
    supported_outline(path)
    load_model(path, torch.float32, CPU)
    load_base_model(path, torch.float32, CPU, key="critic.path")
    load_tokenizer(path)
    TextTokenizer.load(path)
    assert not (folder / "ran").exists()


def test_a_model_of_a_kind_of_its_own_is_refused(folder: Path) -> None:
    change(folder / "config.json", model_type="own", architectures=["Own"])
    for load in (supported_outline, lambda path: load_model(path, torch.float32, CPU)):
        with pytest.raises(ModelError, match="contains custom code"):
            load(str(folder))
    assert not (folder / "ran").exists()


def test_a_tokenizer_of_a_kind_of_its_own_does_not_run(folder: Path) -> None:
    change(folder / "tokenizer_config.json", tokenizer_class="Own")
    load_tokenizer(str(folder))
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("key", KERNELS)
def test_a_kernel_that_a_model_names_is_not_fetched(folder: Path, key: str) -> None:
    change(folder / "config.json", **{key: "own/kernel"})
    path = str(folder)
    CountedModel(path)
    for model in (supported_outline(path), load_model(path, torch.float32, CPU)):
        assert "own/kernel" not in (model.config._attn_implementation, model.config._experts_implementation)
