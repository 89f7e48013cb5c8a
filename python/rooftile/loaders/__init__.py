# SPDX-License-Identifier: Apache-2.0
"""Models, tokenizers and texts from files: GGUF into transformers, and what the demo fetches."""

from rooftile.loaders.fetch import demo_model, demo_text
from rooftile.loaders.gguf import load_gguf
from rooftile.loaders.gguf_file import GGUFFile, read_gguf
from rooftile.loaders.tokenizer import load_tokenizer

__all__ = ["GGUFFile", "demo_model", "demo_text", "load_gguf", "load_tokenizer", "read_gguf"]
