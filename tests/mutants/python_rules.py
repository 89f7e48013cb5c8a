# SPDX-License-Identifier: Apache-2.0
"""Python mutants by rule, from a file's syntax tree."""

import ast
import copy

from places import Mutant

FLIP = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
SUMS = {ast.Add: ast.Sub, ast.Sub: ast.Add}
PRODUCTS = {ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.FloorDiv}
HEAD = "import rooftile_mutant\n"


class Places(ast.NodeVisitor):
    def __init__(self, path, text):
        self.path, self.text, self.found = path, text, []
        self.starts = [0]
        for line in text.encode().splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.data = text.encode()

    def offset(self, line, column):
        return len(self.data[: self.starts[line - 1] + column].decode())

    def span(self, node):
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)

    def add(self, rule, node, mutated, form="expression"):
        begin, end = self.span(node)
        new = ast.unparse(mutated) if mutated is not None else ""
        if new != ast.unparse(node):
            self.found.append(Mutant(self.path, begin, end, self.text[begin:end], new, rule, form))

    def changed(self, rule, node, **fields):
        new = copy.copy(node)
        for name, value in fields.items():
            setattr(new, name, value)
        self.add(rule, node, new)

    # what holds no mutants: text, types, decorators and defaults, which are read once
    def visit_JoinedStr(self, node):
        pass

    def visit_AnnAssign(self, node):
        if node.value:
            self.visit(node.value)

    def visit_FunctionDef(self, node):
        for statement in node.body:
            self.visit(statement)

    def visit_Compare(self, node):
        for i, op in enumerate(node.ops):
            ops = list(node.ops)
            ops[i] = FLIP[type(op)]()
            self.changed("comparison flipped", node, ops=ops)
        self.generic_visit(node)

    def visit_BoolOp(self, node):
        for i in range(len(node.values)):
            rest = node.values[:i] + node.values[i + 1 :]
            if len(rest) == 1:
                self.add("condition dropped", node, rest[0])
            else:
                self.changed("condition dropped", node, values=rest)
        self.generic_visit(node)

    def visit_BinOp(self, node):
        op = type(node.op)
        if op in SUMS:
            self.changed("sign flipped", node, op=SUMS[op]())
        if op in SUMS or op in PRODUCTS:
            self.add("term dropped" if op in SUMS else "factor dropped", node, node.left)
        if op in PRODUCTS:
            self.changed("operator changed", node, op=PRODUCTS[op]())
        if op in (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod):
            self.changed("operands swapped", node, left=node.right, right=node.left)
        self.generic_visit(node)

    def visit_UnaryOp(self, node):
        if isinstance(node.op, ast.Not):
            self.add("negation dropped", node, node.operand)
        self.generic_visit(node)

    def visit_Constant(self, node):
        if isinstance(node.value, bool):
            self.changed("constant flipped", node, value=not node.value)
        elif isinstance(node.value, int):
            self.changed("constant one more", node, value=node.value + 1)

    def visit_Subscript(self, node):
        if isinstance(node.ctx, ast.Load):
            self.generic_visit(node)

    def visit_Slice(self, node):
        for bound in (node.lower, node.upper):
            if bound is not None:
                one = ast.BinOp(left=bound, op=ast.Add(), right=ast.Constant(1))
                self.add("bound one more", bound, one)
        self.generic_visit(node)

    def visit_IfExp(self, node):
        self.changed("branches swapped", node, body=node.orelse, orelse=node.body)
        self.generic_visit(node)

    def visit_Call(self, node):
        plain = [a for a in node.args if not isinstance(a, ast.Starred)]
        named = node.func.id if isinstance(node.func, ast.Name) else ""
        if len(plain) == len(node.args) and named not in ("isinstance", "getattr", "max", "min"):
            for i in range(len(plain) - 1):
                if not isinstance(plain[i], ast.Constant):
                    swapped = [*plain[:i], plain[i + 1], plain[i], *plain[i + 2 :]]
                    self.changed("arguments swapped", node, args=swapped)
        for i, keyword in enumerate(node.keywords):
            if keyword.arg:
                self.changed("keyword dropped", node, keywords=node.keywords[:i] + node.keywords[i + 1 :])
        self.generic_visit(node)

    def visit_If(self, node):
        for value in (True, False):
            refuses = isinstance(node.body[-1], ast.Raise) and not value
            rule = "check dropped" if refuses else f"condition {'always' if value else 'never'} met"
            self.add(rule, node.test, ast.Constant(value))
        self.generic_visit(node)

    def statement(self, node):
        self.add("statement dropped", node, None, "statement")

    def visit_Expr(self, node):
        if isinstance(node.value, ast.Call):
            self.statement(node)
            self.visit(node.value)

    def visit_Assign(self, node):
        if not isinstance(node.targets[0], ast.Name):
            self.statement(node)
        self.visit(node.value)

    def visit_AugAssign(self, node):
        self.statement(node)
        self.visit(node.value)

    def visit_Raise(self, node):
        pass  # the text of an error; that it is raised at all is a rule of its own


def mutants(path, text):
    places = Places(path, text)
    places.visit(ast.parse(text))
    return places.found


def planted(text, chosen):
    """The text with every mutant beside its original."""
    for m in sorted(chosen, key=lambda m: -m.begin):
        flag = f"rooftile_mutant.chosen({m.number})"
        if m.form == "statement":
            indent = " " * (m.begin - (text.rfind("\n", 0, m.begin) + 1))
            mutated = f"\n{indent}    ".join((m.mutated or "pass").split("\n"))
            original = f"\n{indent}else:\n{indent}    " + m.original
            new = f"if {flag}:\n{indent}    {mutated}{original}"
        else:
            new = f"(({m.mutated}) if {flag} else ({m.original}))"
        text = text[: m.begin] + new + text[m.end :]
    at = first_statement(text)
    return text[:at] + HEAD + text[at:]


def first_statement(text):
    """Where an import may stand: behind the docstring and imports from __future__."""
    places = Places("", text)
    for i, node in enumerate(ast.parse(text).body):
        text_only = i == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not text_only and not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            return places.offset(first, 0)
    return len(text)
