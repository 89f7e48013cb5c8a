# SPDX-License-Identifier: Apache-2.0
"""from_pretrained on two processes: a model in 4 or 8 bits is refused where transformers would shard it."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("accelerate")  # transformers needs it to shard
pytest.importorskip("safetensors")
pytest.importorskip("torch")
pytest.importorskip("transformers")

import rooftile as rt
import tiny_checkpoints as tiny
from rooftile.checkpoints import convert

PROCESS = """
import os
import sys
import rooftile as rt
import torch
import transformers
from rooftile.integrations.quantizer import RooftileConfig
from transformers.distributed import DistributedConfig

os.environ["RANK"] = os.environ["LOCAL_RANK"] = sys.argv[1]
torch.distributed.init_process_group("gloo", f"file://{sys.argv[2]}", rank=int(sys.argv[1]), world_size=2)
plan = DistributedConfig(tp_plan="auto")
for folder, options in ((sys.argv[3], {"quantization_config": RooftileConfig(32)}), (sys.argv[4], {})):
    try:
        transformers.AutoModelForCausalLM.from_pretrained(folder, distributed_config=plan, **options)
    except rt.NotSupportedError as error:
        assert "distributed_config spreads the model over 2 devices" in str(error), error
    else:
        raise AssertionError(f"{folder}: loaded")
"""


@pytest.mark.slow
def test_refused_by_name(tmp_path):
    tiny.write(tmp_path / "source", tiny.tensors(None, {}))
    convert(tmp_path / "source", tmp_path / "packed", rounding=rt.W4A16(32), progress=False)
    folders = [tmp_path / name for name in ("store", "source", "packed")]
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    environment["CUDA_VISIBLE_DEVICES"] = ""  # on one GPU two ranks would wait for each other
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, rank, *folders], env=environment, stderr=subprocess.PIPE, text=True
        )
        for rank in ("0", "1")
    ]
    said = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
