# SPDX-License-Identifier: Apache-2.0
"""C++ mutants by rule, from a file's tokens alone. What a rule gets wrong does not compile and is left out."""

import itertools
import re

from places import Mutant

TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*|/\*.*?\*/)
    |(?P<directive>^[ ]*\#(?:[^\n\\]|\\.|\\\n)*)
    |(?P<string>(?:R"\((?s:.*?)\)"|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'))
    |(?P<number>\d(?:[\w.]|(?<=[eEpP])[+-]|'(?=\d))*)
    |(?P<name>[A-Za-z_]\w*)
    |(?P<mark><<=|>>=|->|::|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|\.\.\.|.)""",
    re.X | re.M | re.S,
)
OPEN, CLOSE = {"(": ")", "[": "]", "{": "}"}, {")": "(", "]": "[", "}": "{"}
ASSIGN = {"=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>="}
ENDS = {",", ";", "?", ":", "return", "throw", "else", "do", "case", "{", "}"} | ASSIGN
FLIP = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
SUMS, PRODUCTS, SHIFTS = {"+", "-"}, {"*", "/", "%"}, {"<<", ">>"}
OPERATORS = set(FLIP) | SUMS | PRODUCTS | SHIFTS | {"&&", "||", "&", "|", "^"}
NOT_THERE = re.compile(r"AVX512|__CUDA|__AVX512")  # code that this build or most machines do not run
SYMMETRIC = {"min", "max", "fmin", "fmax", "fminf", "fmaxf", "swap", "dot", "equal"}
SKIPPED = {"static_assert", "template", "using", "enum", "typedef", "namespace", "constexpr", "friend", "extern"}

NO_STATEMENT = set(
    "return throw break continue if for while else do case delete goto const static auto struct class public private"
    " default virtual explicit inline typename".split()
)


class Token:
    __slots__ = ("begin", "end", "kind", "partner", "spaced", "text")

    def __init__(self, kind, text, begin, end):
        self.kind, self.text, self.begin, self.end = kind, text, begin, end
        self.partner = None


def tokens_of(text):
    """Tokens without space, comments and directives, and without what lies under a condition that is not met here."""
    found, hidden = [], []
    for match in TOKEN.finditer(text):
        kind = match.lastgroup
        if kind == "directive":
            word = match.group().strip().lstrip("#").strip()
            if word.startswith("if"):
                hidden.append(bool(NOT_THERE.search(word)))
            elif word.startswith(("elif", "else")) and hidden:
                hidden[-1] = bool(NOT_THERE.search(word)) if word.startswith("elif") else False
            elif word.startswith("endif") and hidden:
                hidden.pop()
        elif kind != "space" and not any(hidden):
            found.append(Token(kind, match.group(), match.start(), match.end()))
    stack = []
    for i, token in enumerate(found):
        token.spaced = text[token.begin - 1 : token.begin].isspace() and text[token.end : token.end + 1].isspace()
        if token.text in OPEN:
            stack.append(i)
        elif token.text in CLOSE and stack:
            token.partner = stack.pop()
            found[token.partner].partner = i
    return found


class File:
    def __init__(self, path, text):
        self.path, self.text, self.tokens = path, text, tokens_of(text)
        self.found = []

    def binary(self, i):
        """An operator between two operands; angle brackets of templates and unary signs have no space on both sides."""
        return self.tokens[i].spaced and self.tokens[i].text in OPERATORS

    def slot(self, i, ends):
        """[first, last]: the tokens of the expression around token i, up to those in `ends` on both sides; or None."""
        t, first, last = self.tokens, i, i
        while first > 0:
            before = t[first - 1]
            if before.text in OPEN or (before.text in ends and (before.text not in OPERATORS or before.spaced)):
                break
            if before.text in CLOSE:
                if before.text == "}" or before.partner is None:
                    return None
                first = before.partner
            else:
                first -= 1
        while last + 1 < len(t):
            after = t[last + 1]
            if after.text in CLOSE or (after.text in ends and (after.text not in OPERATORS or after.spaced)):
                break
            if after.text in OPEN:
                if after.text == "{" or after.partner is None:
                    return None
                last = after.partner
            else:
                last += 1
        return first, last

    def statement_head(self, i):
        """The first token of the statement or declaration that token i is in."""
        while i > 0 and self.tokens[i - 1].text not in (";", "{", "}"):
            before = self.tokens[i - 1]
            i = before.partner if before.text in (")", "]") and before.partner else i - 1
        return i

    def add(self, rule, first, last, edits, form="expression"):
        """edits: (begin, end, new text) within the slot of tokens [first, last]."""
        begin, end = self.tokens[first].begin, self.tokens[last].end
        mutated, at = "", begin
        for edit_begin, edit_end, new in sorted(edits):
            mutated += self.text[at:edit_begin] + new
            at = edit_end
        mutated += self.text[at:end]
        original = self.text[begin:end]
        if mutated.strip() == original.strip() or "//" in original:
            return
        self.found.append(Mutant(self.path, begin, end, original, mutated.strip(), rule, form))

    def operand_end(self, i, last, ends):
        """The last token of the operand behind the operator at i."""
        j = i
        while j < last and not (self.binary(j + 1) and self.tokens[j + 1].text in ends):
            j = self.tokens[j + 1].partner if self.tokens[j + 1].text in OPEN else j + 1
        return j

    def mutants(self):
        skip_to = -1
        for i, token in enumerate(self.tokens):
            if i <= skip_to:
                continue
            head = self.tokens[self.statement_head(i)].text if token.text in OPERATORS or token.kind == "number" else ""
            if head in SKIPPED:
                continue
            if self.binary(i):
                self.operator(i)
            elif token.kind == "number":
                self.number(i)
            elif token.text == "[":
                self.index(i)
            elif token.text == "(":
                self.call(i)
            elif token.text == "?":
                self.choice(i)
            elif token.text == "!" and self.tokens[i - 1].text in ("(", "&&", "||", "=", "return"):
                slot = self.slot(i, ENDS | {"&&", "||"})
                if slot:
                    self.add("negation dropped", *slot, [(token.begin, token.end, "")])
            elif token.text == ";":
                self.statement(i)
        return self.found

    def operator(self, i):
        t, op = self.tokens, self.tokens[i].text
        if op in FLIP:
            slot = self.slot(i, ENDS | {"&&", "||"})
            if slot:
                self.add("comparison flipped", *slot, [(t[i].begin, t[i].end, FLIP[op])])
                if op in ("<", "<=", ">", ">="):
                    begin, end = t[slot[0]].begin, t[slot[1]].end
                    self.add("comparison negated", *slot, [(begin, begin, "!("), (end, end, ")")])
        elif op in ("&&", "||"):
            slot = self.slot(i, ENDS | ({"||"} if op == "&&" else set()))
            if slot:
                end = self.operand_end(i, slot[1], {"&&", "||"})
                self.add("condition dropped", *slot, [(t[i].begin, t[end].end, "")])
                before = [j + 1 for j in self.others(i, slot) if j < i and t[j].text in ("&&", "||")]
                begin = max(before, default=slot[0])
                self.add("condition dropped", *slot, [(t[begin].begin, t[i].end, "")])
        elif op in SUMS:
            slot = self.slot(i, ENDS | {"&&", "||"} | set(FLIP) | SHIFTS)
            if slot:
                end = self.operand_end(i, slot[1], SUMS | set(FLIP) | {"&", "|", "^"})
                self.add("sign flipped", *slot, [(t[i].begin, t[i].end, "-" if op == "+" else "+")])
                self.add("term dropped", *slot, [(t[i].begin, t[end].end, "")])
        elif op in PRODUCTS:
            slot = self.slot(i, ENDS | {"&&", "||"} | set(FLIP) | SUMS | SHIFTS)
            if slot:
                end = self.operand_end(i, slot[1], PRODUCTS)
                self.add("factor dropped", *slot, [(t[i].begin, t[end].end, "")])
                if op != "*" and slot[0] < i and not self.others(i, slot):
                    left, right = self.text[t[slot[0]].begin : t[i - 1].end], self.text[t[i + 1].begin : t[slot[1]].end]
                    self.add("operands swapped", *slot, [(t[slot[0]].begin, t[slot[1]].end, f"{right} {op} {left}")])
        elif op in SHIFTS:
            slot = self.slot(i, ENDS | {"&&", "||"} | set(FLIP))
            if slot:
                self.add("shift flipped", *slot, [(t[i].begin, t[i].end, ">>" if op == "<<" else "<<")])
        elif op in ("&", "|"):
            slot = self.slot(i, ENDS | {"&&", "||"} | set(FLIP))
            if slot:
                self.add("bits swapped", *slot, [(t[i].begin, t[i].end, "|" if op == "&" else "&")])

    def others(self, i, slot):
        """The operators of the slot, in no bracket of it, but that at i."""
        return [j for j in range(*slot) if j != i and self.binary(j) and self.top(j, slot)]

    def top(self, j, slot):
        """Whether token j lies in no bracket of the slot."""
        i = slot[0]
        while i < j:
            i = self.tokens[i].partner + 1 if self.tokens[i].text in OPEN and self.tokens[i].partner else i + 1
        return i == j

    def number(self, i):
        token = self.tokens[i]
        if not re.fullmatch(r"\d+", token.text) or self.tokens[i - 1].text == "<":
            return
        slot = self.slot(i, ENDS | {"&&", "||"})
        if slot:
            self.add("constant one more", *slot, [(token.begin, token.end, str(int(token.text) + 1))])

    def index(self, i):
        t, last = self.tokens, self.tokens[i].partner
        if last is None or last == i + 1 or i == 0 or (t[i - 1].kind == "mark" and t[i - 1].text not in (")", "]")):
            return
        if t[i + 1].text in ("[", "&", "=", "this") or t[last + 1].text == "{":  # an attribute or a lambda
            return
        self.add("index one more", i + 1, last - 1, [(t[last - 1].end, t[last - 1].end, " + 1")])

    def call(self, i):
        t, last = self.tokens, self.tokens[i].partner
        if last is None or last == i + 1 or t[i - 1].kind != "name":
            return
        if t[i - 1].text in ("if", "while"):
            if not any(x.text in (";", "{", "=") for x in t[i:last]):  # declares nothing
                self.add("condition always met", i + 1, last - 1, [(t[i + 1].begin, t[last - 1].end, "true")])
                self.add("condition never met", i + 1, last - 1, [(t[i + 1].begin, t[last - 1].end, "false")])
            return
        if t[i - 1].text in ("for", "switch", "sizeof"):
            return
        commas, j = [], i + 1
        while j < last:
            if t[j].text in OPEN and t[j].partner:
                j = t[j].partner
            elif t[j].text == ",":
                commas.append(j)
            j += 1
        bounds = [i, *commas, last]
        arguments = [(bounds[k] + 1, bounds[k + 1] - 1) for k in range(len(bounds) - 1)]
        slot = self.slot(i - 1, ENDS | {"&&", "||"} | OPERATORS)
        if not slot or t[i - 1].text in ("ROOFTILE_CHECK", "ROOFTILE_CHECK_KIND"):
            return
        if t[i - 1].text in ("min", "max"):
            other = "max" if t[i - 1].text == "min" else "min"
            self.add("min and max swapped", *slot, [(t[i - 1].begin, t[i - 1].end, other)])
        if t[i - 1].text not in SYMMETRIC:
            for (a, b), (c, d) in itertools.pairwise(arguments):
                if a > b or c > d or any(x.text == "{" for x in t[a : d + 1]):
                    continue
                left, right = self.text[t[a].begin : t[b].end], self.text[t[c].begin : t[d].end]
                if t[a].kind != "string" and t[c].kind != "string":
                    self.add("arguments swapped", *slot, [(t[a].begin, t[b].end, right), (t[c].begin, t[d].end, left)])

    def choice(self, i):
        slot = self.slot(i, ENDS - {"?", ":"})
        if not slot:
            return
        colon = [j for j in range(i + 1, slot[1]) if self.tokens[j].text == ":" and self.top(j, slot)]
        if len(colon) == 1 and sum(self.tokens[j].text == "?" and self.top(j, slot) for j in range(*slot)) == 1:
            t, j = self.tokens, colon[0]
            left, right = self.text[t[i + 1].begin : t[j - 1].end], self.text[t[j + 1].begin : t[slot[1]].end]
            self.add("branches swapped", *slot, [(t[i + 1].begin, t[slot[1]].end, f"{right} : {left}")])

    def statement(self, end):
        """A call or an assignment that is a statement of a block, ending at token `end`."""
        t, head = self.tokens, self.statement_head(end)
        if not 0 < head < end or t[head].kind != "name" or t[head].text in SKIPPED | NO_STATEMENT:
            return
        if t[head + 1].kind == "name" or t[head + 1].text in ("<", "&", "*", ":"):  # a declaration
            return
        body = t[head:end]
        is_call = t[end - 1].text == ")" and not any(x.text in ASSIGN for x in body)
        is_assignment = sum(x.text in ASSIGN for x in body) >= 1 and not any(x.text in ("{", "}") for x in body)
        if any(x.text == "{" for x in body) or not (is_call or is_assignment or body[0].text in ("++", "--")):
            return
        rule = "check dropped" if "CHECK" in t[head].text or "check" in t[head].text else "statement dropped"
        self.add(rule, head, end, [(t[head].begin, t[end].end, "")], "statement")


def declares(m):
    """Whether what looks like a call declares a function or a variable: a type stands before its name."""
    return m.rule == "arguments swapped" and bool(re.match(r"[\w:<>, ]+[&*]* +[&*]*\w+\(", m.original))


def mutants(path, text):
    return File(path, text).mutants()


def planted(text, chosen):
    """The text with every mutant beside its original. Lines keep their numbers."""
    for m in sorted(chosen, key=lambda m: -m.begin):
        flag = f"rooftile_mutant({m.number})"
        mutated = " ".join(m.mutated.split("\n")) if m.mutated else ""
        if m.form == "statement":
            new = f"if ({flag}) {{ {mutated} }} else {{ {m.original} }}"
        else:
            new = f"({flag} ? ({mutated}) : ({m.original}))"
        text = text[: m.begin] + new + text[m.end :]
    return text
