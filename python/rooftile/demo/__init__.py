# SPDX-License-Identifier: Apache-2.0
"""What `rooftile demo` is made of: the variants and how they are measured, the tables, the picture."""

from importlib.resources import files

TEXT_TITLE = (
    "Botchan, chapters 1-2, by Natsume Soseki, translated by Yasotaro Morri, revised by J. R. Kennedy (1919), "
    "public domain"
)


def text():
    """The English text that ships with the demo."""
    return (files(__name__) / "botchan.txt").read_text(encoding="utf-8")
