# SPDX-License-Identifier: Apache-2.0
"""What became of the weights of a model that was rounded, as an object and in lines."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RoundingReport:
    """What became of a model's weights.

    bits, group_size: as asked. group_sizes: name of a layer (of experts: of their parameter) -> its group size. left:
    name of a parameter that stays as it was -> (number of elements, why). packed: elements that were in 4 or 8 bits
    before. total: elements of the model, shared ones once. str() of it is a summary.
    """

    bits: int
    group_size: int
    group_sizes: dict
    left: dict
    rounded: int
    packed: int
    total: int

    @property
    def smaller_groups(self):
        """group_sizes of the layers that take smaller groups than asked."""
        return {name: size for name, size in self.group_sizes.items() if size != self.group_size}

    def __str__(self):
        share = f"{self._share(self.rounded)} of {self.total:,} parameters"
        lines = [f"Rounded to {self.bits} bits: {share}, groups of {self.group_size}"]
        if self.packed:
            lines.append(f"In 4 or 8 bits before: {self._share(self.packed)}")
        return "\n".join(lines + notes(self.group_size, self.smaller_groups, self.left, self.total))

    def _share(self, elements):
        return _percent(elements, self.total)


def notes(group_size, smaller_groups, left, total):
    """Lines that say which layers take smaller groups than asked and what was left. Arguments as of RoundingReport."""
    lines, sizes, reasons = [], {}, {}
    for name, size in smaller_groups.items():
        kinds = sizes.setdefault(size, {})
        kinds[kind_of(name)] = kinds.get(kind_of(name), 0) + 1
    for size, kinds in sizes.items():
        names = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        lines.append(f"Groups of {size}, since {group_size} does not divide their columns: {names}")
    for name, (elements, why) in left.items():
        before, kinds = reasons.get(why, (0, {}))
        reasons[why] = before + elements, kinds | {kind_of(name): None}
    for why, (elements, kinds) in sorted(reasons.items(), key=lambda item: -item[1][0]):
        lines.append(f"Left as they were, {why}: {_percent(elements, total)} ({', '.join(kinds)})")
    return lines


def _percent(elements, total):
    return f"{100 * elements / max(total, 1):.1f} %"


def kind_of(name):
    """q_proj of model.layers.3.self_attn.q_proj, and what of it; experts.down of model.layers.3.mlp.experts.down."""
    parts = [part for part in name.removesuffix(".weight").split(".") if not part.isdigit()]
    whole = parts[-1:] == ["bias"] or parts[-2:-1] == ["experts"]
    return ".".join(parts[-2:] if whole else parts[-1:]) or name
