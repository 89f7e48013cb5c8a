# SPDX-License-Identifier: Apache-2.0
"""The guides' Python runs as it stands, a guide's blocks one after the other, with the names that a reader brings."""

import doctest
import re
from pathlib import Path

import pytest
import rooftile as rt

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import tiny_checkpoints as tiny  # noqa: E402
from rooftile import _C  # noqa: E402
from rooftile.checkpoints import convert  # noqa: E402
from rooftile.integrations._models import CACHE  # noqa: E402

GUIDES = Path(__file__).parents[2] / "docs/guide"
# What a block says that is not run here, and why
ELSEWHERE = {
    "llmcompressor": "another library, which takes a GPU's time",
    "lm_eval": "another library; test_harnesses.py runs it where it is installed",
    "CUDAGraph": "needs a GPU",
    "load_gguf": "a model that is fetched; test_demo_model.py runs it",
}


def blocks(guide):
    """Its Python; the argument of generate() is called as the installed transformers calls it, which the guide says."""
    found = re.findall(r"^```python\n(.*?)^```$", (GUIDES / guide).read_text(), re.M | re.S)
    return [block.replace("generate(**inputs, cache=", f"generate(**inputs, {CACHE}=") for block in found]


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16()


def of_cache_formats():
    block = _C.kv_block_bytes("int4-kivi", 64, 128)
    ring = (*(torch.zeros(2, 8, 64, 128, dtype=torch.bfloat16) for _ in "kv"), torch.zeros(2, dtype=torch.int32))
    return {
        "k": normal(2, 40, 8, 128),
        "v": normal(2, 40, 8, 128),
        "index": torch.arange(16, dtype=torch.int32).flip(0),
        "pool": normal(4, 2, 64, 8, 128),
        "k_pool": normal(4, 8, 64, 128),
        "v_pool": normal(4, 8, 64, 128),
        "code_pool": torch.zeros(4, 8, block, dtype=torch.uint8),
        "ring": ring,
        "block_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
        "seq_lens": torch.zeros(2, dtype=torch.int32),
    }


def of_a_model():
    return {"model": tiny.model(), "inputs": {"input_ids": torch.tensor([[5, 17, 3]])}, "path": "Llama-bf16-folder"}


GIVEN = {
    "gpu.md": lambda: {"rt": rt},
    "cache-formats.md": of_cache_formats,
    "models.md": of_a_model,
    "quick-start.md": of_a_model,
    "transformers.md": of_a_model,
}


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """The checkpoints that guides name, small, in the working directory."""
    monkeypatch.chdir(tmp_path)
    tiny.write(tmp_path / "Llama-bf16-folder", tiny.tensors(None, {}))
    codes = {name: tiny.weight(name, shape) for name, shape in tiny.MODULES.items()}
    tiny.write(tmp_path / "Llama-GPTQ-folder", tiny.tensors(tiny.gptq, codes), tiny.gptq_config())
    convert("Llama-GPTQ-folder", "llama-w4", progress=False)


@pytest.mark.parametrize("guide", sorted(p.name for p in GUIDES.glob("*.md") if blocks(p.name)))
def test_a_guides_python_runs(guide, folders):
    names = GIVEN.get(guide, dict)()
    for number, block in enumerate(blocks(guide), 1):
        place = f"{guide}, block {number}"
        if block.startswith(">>>"):
            session = doctest.DocTestParser().get_doctest(block, names, place, guide, 0)
            assert doctest.DocTestRunner().run(session).failed == 0
        elif not any(text in block for text in ELSEWHERE):
            exec(compile(block, place, "exec"), names)


def test_what_runs_elsewhere_is_there():
    everything = "".join(block for path in GUIDES.glob("*.md") for block in blocks(path.name))
    assert [text for text in ELSEWHERE if text not in everything] == []
