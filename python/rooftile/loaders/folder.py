# SPDX-License-Identifier: Apache-2.0
"""A model in a folder: of transformers, or one that `rooftile convert` wrote."""

import pathlib

from rooftile.errors import ArgumentError

_ONLY_FILES = {"local_files_only": True, "trust_remote_code": False}
_MOST = 400  # characters of what transformers says, which may be pages


def packed_by(path):
    """The quant_method of a folder's model, None where its weights are not rounded."""
    from rooftile.checkpoints.folder import read_json

    packing = read_json(pathlib.Path(path, "config.json")).get("quantization_config")
    return packing.get("quant_method", "unknown") if isinstance(packing, dict) else packing


def folder_config(path, option):
    """The config of a folder's model. option: where errors say that the folder came from."""
    import transformers

    with _naming(f"{option} {path}", "its config.json cannot be read"):
        return transformers.AutoConfig.from_pretrained(path, **_ONLY_FILES)


def folder_tokenizer(path, option):
    """The tokenizer of a folder. option: as of folder_config."""
    import transformers

    with _naming(f"{option} {path}", "its tokenizer cannot be read"):
        return transformers.AutoTokenizer.from_pretrained(path, **_ONLY_FILES)


def folder_model(path, dtype, device, option):
    """The model of a folder as it is stored, with activations in `dtype`. option: as of folder_config."""
    import transformers

    from rooftile import checkpoints

    if packed_by(path) not in (None, "rooftile"):
        model = checkpoints.load(path, dtype=dtype)
    else:
        with _naming(f"{option} {path}", "cannot be loaded"):
            model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **_ONLY_FILES)
    return model.to(device).eval()


class _naming:
    """What transformers raises about files becomes an ArgumentError that names where they are."""

    def __init__(self, where, what):
        self.where, self.what = where, what

    def __enter__(self):
        pass

    def __exit__(self, kind, error, traceback):
        from safetensors import SafetensorError

        if isinstance(error, OSError | ValueError | KeyError | TypeError | AttributeError | SafetensorError):
            text = " ".join(str(error).split())
            text = text if len(text) <= _MOST else f"{text[:_MOST]} ..."
            raise ArgumentError(f"{self.where}: {self.what}: {text or type(error).__name__}") from error
