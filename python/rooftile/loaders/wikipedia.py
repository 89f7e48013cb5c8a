# SPDX-License-Identifier: Apache-2.0
"""Plain text out of a MediaWiki XML export: enough for perplexity, not a wiki parser."""

import bz2
import re
import xml.etree.ElementTree as ElementTree

_MINIMUM = 2000  # characters: shorter articles are lists and stubs
_LAST_SECTIONS = "See also|References|External links|Notes|Footnotes|Further reading|Bibliography"

# In this order; the first group is removed again and again, from the innermost pair of brackets outwards.
_NESTED = [
    r"\{\{[^{}]*\}\}",  # templates
    r"\{\|(?:(?!\{\|).)*?\|\}",  # tables
    r"\[\[(?:File|Image|Category)[^\[\]]*(?:\[\[[^\[\]]*\]\][^\[\]]*)*\]\]",
]
_BEFORE = [
    r"<!--.*?-->",
    r"<ref[^>]*/>",
    r"<ref[^>]*>.*?</ref>",
    r"<(gallery|math|code|timeline|source|pre)[^>]*>.*?</\1>",
]
_AFTER = [
    (r"\[\[[^\[\]|]*\|([^\[\]]*)\]\]", r"\1"),  # links: what they show
    (r"\[\[([^\[\]]*)\]\]", r"\1"),
    (r"\[https?://\S+ ([^\]]*)\]", r"\1"),
    (r"\[https?://\S+\]", ""),
    (r"<[^>]+>", ""),
    (r"'{2,}", ""),  # bold, italic
    (rf"^=+\s*(?:{_LAST_SECTIONS})\s*=+\s*$(?s:.*)", ""),
    (r"^=+\s*(.*?)\s*=+\s*$", r"\1"),  # headings
    (r"^[*#:;]+\s*", "- "),  # lists
    (r"\(\s*\)", ""),  # what a template leaves
    (r"[ \t]+", " "),
    (r" *\n *", "\n"),
    (r"\n{3,}", "\n\n"),
]


def plain_text(path):
    """The articles of a bz2-compressed MediaWiki export: title, blank line, text; two blank lines between articles.

    Without redirects, pages of other namespaces, articles of 2,000 characters or fewer, templates, tables, references,
    pictures and what follows "See also" or "References".
    """
    with bz2.open(path) as f:
        root = ElementTree.parse(f).getroot()
    space = root.tag.removesuffix("mediawiki")
    articles = []
    for page in root.iter(f"{space}page"):
        title = page.findtext(f"{space}title")
        if page.find(f"{space}redirect") is None and ":" not in title:
            text = strip_markup(page.findtext(f"{space}revision/{space}text") or "")
            if len(text) > _MINIMUM:
                articles.append(f"{title}\n\n{text}")
    return "\n\n\n".join(articles)


def strip_markup(text):
    """Wiki markup to plain text: links become what they show, headings lines, list items lines with a dash."""
    for pattern in _BEFORE:
        text = re.sub(pattern, "", text, flags=re.DOTALL)
    for pattern in _NESTED:
        found = 1
        while found:
            text, found = re.subn(pattern, "", text, flags=re.DOTALL | re.IGNORECASE)
    for pattern, replacement in _AFTER:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE | re.IGNORECASE)
    return text.strip()
