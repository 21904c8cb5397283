"""Jinja templates that guard the control tokens which they write themselves. Pure computation.

The template's inputs are unchanged, so that it inspects, strips and splits texts as usual. Only its own literals are marked
(`ControlTokens.mark`), except those that it compares with or searches for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from jinja2 import Environment, Template, nodes
from jinja2.visitor import NodeTransformer


def marked(environment: Environment, source: str, mark: Callable[[str], str]) -> Template:
    """Return the template of a source, with `mark` done to the literals that it may write."""
    tree = _Marking(mark).visit(environment.parse(source))
    code = environment.compile(cast(nodes.Template, tree))
    return environment.template_class.from_code(environment, code, environment.make_globals(None))


class _Marking(NodeTransformer):
    def __init__(self, mark: Callable[[str], str]) -> None:
        self._mark = mark

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        node.data = self._mark(node.data)
        return node

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        if isinstance(node.value, str):
            node.value = self._mark(node.value)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        node.node = self.visit(node.node)
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        if node.node is not None:
            node.node = self.visit(node.node)
        return node

    def visit_Call(self, node: nodes.Call) -> Any:
        """Leave the arguments of methods unmarked, because methods of texts search for them; macros and functions may
        write theirs."""
        if not isinstance(node.node, nodes.Getattr):
            return self.generic_visit(node)
        node.node.node = self.visit(node.node.node)
        return node
