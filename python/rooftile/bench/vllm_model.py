# SPDX-License-Identifier: Apache-2.0
"""vLLM (Kwon et al. 2023, arXiv 2309.06180) as a model that bench e2e measures, where vLLM is installed."""

import os
import tempfile

import torch
import transformers

_MEMORY = 0.85  # of the GPU's, for weights and cache: the models of the rows before are gone by then


class VllmModel:
    """What bench e2e asks of a model of transformers: config, generate() and a forward over a prompt.

    config: transformers'. path: the folder that has the weights; None: vLLM makes random ones. The engine runs in this
    process, in bfloat16, by CUDA graphs, without a prefix cache: `rows` rows of `tokens` tokens. shapes: the model on
    the meta device.
    """

    def __init__(self, config, path, rows, tokens):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # vLLM reads it once it is imported
        import vllm

        with torch.device("meta"):
            self.shapes = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        self.config = config = self.shapes.config
        self._sampling = vllm.SamplingParams
        options = {} if path else {"load_format": "dummy"}
        with tempfile.TemporaryDirectory() as folder:
            config.architectures = [type(self.shapes).__name__]
            config.save_pretrained(folder)
            self._engine = vllm.LLM(
                model=path or folder,
                skip_tokenizer_init=True,
                dtype="bfloat16",
                max_model_len=tokens,
                max_num_seqs=rows,
                gpu_memory_utilization=_MEMORY,
                enable_prefix_caching=False,
                **options,
            )

    def generate(self, ids, *, max_new_tokens, **greedy):
        """Greedy, whatever tokens come: bench e2e asks for nothing else."""
        asked = self._sampling(temperature=0.0, max_tokens=max_new_tokens, ignore_eos=True, detokenize=False)
        return self._engine.generate([{"prompt_token_ids": row} for row in ids.tolist()], asked, use_tqdm=False)

    def __call__(self, ids, **options):
        """A prompt and the one token that vLLM takes of it."""
        return self.generate(ids, max_new_tokens=1)
