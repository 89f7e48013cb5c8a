# SPDX-License-Identifier: Apache-2.0
"""Why a parameter of a model is not rounded."""

import fnmatch
import inspect

from rooftile import _C

_FEW = _C.w4_tile_rows  # rows of a tile: a layer of fewer takes as much memory in 4 bits


class Reasons:
    """Why a parameter stays as it is; None for one to be rounded.

    patterns: of `skip`. forms: name of a module -> its ExpertsForm. only: as of RoundingPlan. places: module -> the
    names of all places where it is, in the order of named_modules.
    """

    def __init__(self, model, patterns, forms, only):
        import torch

        from rooftile.experts import PackedExperts

        self.patterns, self.forms, self.only = patterns, forms, only
        self.places = {}
        for name, module in model.named_modules(remove_duplicate=False):
            self.places.setdefault(module, []).append(name)
        self.head = getattr(model, "get_output_embeddings", lambda: None)()
        self.holders = {}  # how many modules hold each parameter
        self.read = set()  # modules whose weights another one reads
        blocks = {}  # the module around experts, and how many they are
        for path, module in model.named_modules():
            own = list(module.parameters(recurse=False))
            for parameter in own:
                self.holders[parameter] = self.holders.get(parameter, 0) + 1
            if isinstance(module, torch.nn.TransformerEncoderLayer | torch.nn.MultiheadAttention):
                self.read.update(module.children())
            stacked = {len(parameter) for parameter in own if parameter.ndim == 3}
            if isinstance(module, PackedExperts):
                blocks[path] = module.form.experts
            elif len(stacked) == 1 and self._is_experts(module, path):
                blocks[path] = stacked.pop()
            elif path.rpartition(".")[2] == "experts" and hasattr(module, "__len__"):
                blocks[path] = len(module)
        self.blocks = {path.rpartition(".")[0]: (path, count) for path, count in blocks.items()}

    def __call__(self, module, suffix, parameter):
        from rooftile.experts import STACKS

        why = self._own(module, suffix, parameter)
        if why is None and suffix in STACKS and self.places[module][0] in self.forms:
            others = [name for name in STACKS if name != suffix]
            if any(self._own(module, name, module.get_parameter(name)) is not None for name in others):
                return f"experts whose {' and '.join(others)} is left"  # PackedExperts holds all of them packed
        return why

    def _own(self, module, suffix, parameter):
        """Why, whatever becomes of the module's other parameters."""
        import torch

        places = self.places[module]
        names = [f"{place}.{suffix}" for place in places]
        linear = type(module) is torch.nn.Linear and suffix == "weight"  # what a subclass adds would be lost
        experts = places[0] in self.forms and parameter.ndim == 3
        if parameter.ndim < 2 or suffix.endswith("bias"):
            return "norms and biases"
        if isinstance(module, torch.nn.Embedding):
            return "embeddings"
        if module is self.head or any(place.rpartition(".")[2] == "lm_head" for place in places):
            return "output head"
        if any(self._is_router(place, parameter, linear) for place in places):
            return "routers"
        if linear and len(parameter) < _FEW:
            return f"fewer than {_FEW} outputs"
        if any(fnmatch.fnmatchcase(n, p) for n in (*places, *names) for p in self.patterns):
            return "skipped"
        if self.only is not None and self.only.isdisjoint(names):
            return "as in the source"
        if self.holders[parameter] > 1:
            return "shared with another module"
        if suffix == "weight" and module in self.read:
            return "weights that the module around reads itself"
        if linear or experts:
            return self._not_replaced(module, linear)
        stack = parameter.ndim == 3 and self._is_experts(module, places[0])
        return "experts of a form not known" if stack else "no weight of a plain Linear"

    @staticmethod
    def _is_experts(module, path):
        """Whether a module with parameters of three dimensions says that they are experts: those of convolutions and
        of tables are none.
        """
        return "expert" in f"{path.rpartition('.')[2]} {type(module).__name__}".lower()

    def _is_router(self, path, parameter, linear):
        """Routers and gates are named so; of any name, a Linear with one output for each expert beside it."""
        if parameter.ndim != 2:
            return False
        if any(part == "gate" or "router" in part.split("_") for part in path.split(".")):
            return True
        around = path if linear else ""
        while around:
            around = around.rpartition(".")[0]
            inside, count = self.blocks.get(around, ("", None))
            if len(parameter) == count and not f"{path}.".startswith(f"{inside}."):
                return True
        return False

    def _not_replaced(self, module, linear):
        """Why another module cannot stand for a Linear or for experts."""
        from rooftile.experts import PackedExperts
        from rooftile.nn import STATE_HOOKS, PackedLinear, own_names

        if linear and module.bias is not None and module.bias.dtype != module.weight.dtype:
            return "biases of another dtype than the weight"
        held = len([*module.parameters(), *module.buffers(), *module.children()])
        if linear and held > (1 if module.bias is None else 2):
            return "more than a weight and a bias"
        if any(getattr(module, name) for name in STATE_HOOKS):
            return "hooks on their state_dict"
        taken = vars(module).keys() & own_names(PackedLinear if linear else PackedExperts)
        if not all(_is_method(module, name) for name in taken):
            return "forward or another attribute overridden"
        return None


def _is_method(module, name):
    """Whether an attribute of the instance is only the method of its class, as accelerate leaves it behind."""
    value = vars(module)[name]
    bound = inspect.ismethod(value) and value.__self__ is module
    return bound and value.__func__ is getattr(type(module), name, None)
