"""Formulas in plain notation (`k* = √(L·b/a) = 1.8`) to native MathML: typeset by the browser, read by screen readers,
with no script and no style of its own.

    equation := sum (relation sum)*          relation := = | ≈ | < | > | ≤ | ≥
    sum      := ±? quotient (± quotient)*
    quotient := product (/ product-item)*    written as a fraction; `/` binds the product before it
    item     := √ item | ( sum ) | name | number | words in "quotes"
    name     := letters, `_index` and `^power` after it
"""

from __future__ import annotations

import re

from markupsafe import Markup, escape

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?)|(?P<name>[A-Za-zΑ-ωℓ∂Δ]+\*?)|(?P<quoted>\"[^\"]*\")|(?P<mark>.))"
)
_RELATIONS = {"=", "≈", "<", ">", "≤", "≥", "→"}


_SPACE = '<mspace width="0.25em"></mspace>'


class _Parser:
    def __init__(self, text: str) -> None:
        self.tokens = [(str(m.lastgroup), m[str(m.lastgroup)]) for m in _TOKEN.finditer(text) if m[0].strip()]
        self.at = 0

    @property
    def next(self) -> str:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else ""

    def take(self) -> tuple[str, str]:
        token = self.tokens[self.at]
        self.at += 1
        return token

    def equation(self) -> str:
        parts = [self.sum()]
        while self.next in _RELATIONS:
            parts += [_operator(self.take()[1]), self.sum()]
        while self.next:  # what no rule takes (a comma, a stray bracket) is set as it stands
            parts += [_operator(self.take()[1]), self.sum() if self.next else ""]
        return "".join(parts)

    def sum(self) -> str:
        sign = _operator(self.take()[1].replace("-", "−")) if self.next in ("-", "−", "+") else ""
        parts = [sign, self.product()]
        while self.next in ("+", "-", "−"):
            parts += [_operator(self.take()[1].replace("-", "−")), self.product()]
        return "".join(parts)

    def product(self) -> str:
        parts, bare = [self.item()], True
        while True:
            if self.next in ("·", "×"):
                self.take()
                parts += [_operator("·"), self.item()]
            elif self.next == "/":
                self.take()
                parts = [f"<mfrac><mrow>{_unwrapped(parts)}</mrow><mrow>{_unwrapped([self.item()])}</mrow></mfrac>"]
            elif bare and self._starts_item():
                parts += ["" if self.next == "(" else _SPACE, self.item()]
            else:
                return "".join(parts)

    def _starts_item(self) -> bool:
        return self.at < len(self.tokens) and (self.tokens[self.at][0] != "mark" or self.next in ("√", "(", "⌈"))

    def item(self) -> str:
        if not self.next:
            return ""
        kind, text = self.take()
        if text == "√":
            return f"<msqrt>{_unwrapped([self.item()])}</msqrt>"
        if text in ("(", "⌈"):
            inside = self.sum()
            while self.next == ",":
                inside += _operator(self.take()[1]) + self.sum()
            close = self.take()[1] if self.next in (")", "⌉") else ""
            if inside.startswith("<mfrac>") and inside.count("<mfrac>") == 1 and inside.endswith("</mfrac>"):
                return inside  # a fraction needs no brackets of its own
            return self._powers(f"<mrow><mo>{text}</mo>{inside}<mo>{close}</mo></mrow>")
        if kind == "number":
            return self._powers(f"<mn>{text.replace(',', '&#8239;')}</mn>")
        if kind == "quoted":
            return f"<mtext>{escape(text[1:-1])}</mtext>"
        if kind == "name":
            return self._powers(_name(text))
        return _operator(text)

    def _powers(self, base: str) -> str:
        below = above = ""
        while self.next in ("_", "^"):
            mark = self.take()[1]
            if mark == "_":
                below = self.item_alone()
            else:
                above = self.item_alone()
        if below and above:
            return f"<msubsup>{base}{below}{above}</msubsup>"
        if below or above:
            tag = "msub" if below else "msup"
            return f"<{tag}>{base}{below or above}</{tag}>"
        return base

    def item_alone(self) -> str:
        """An index or power: one token."""
        kind, text = self.take() if self.next else ("name", "")
        return f"<mn>{text}</mn>" if kind == "number" else _name(text)


def _name(text: str) -> str:
    """One letter is a variable (italic); more are a word (upright); a star is a mark above."""
    if text.endswith("*"):
        return f'<msup>{_name(text[:-1])}<mo lspace="0" rspace="0">∗</mo></msup>'
    return f"<mi>{escape(text)}</mi>"


def _operator(text: str) -> str:
    return f"<mo>{escape(text)}</mo>"


def _unwrapped(parts: list[str]) -> str:
    """A single bracketed group without its brackets: under a root and in a fraction they are not needed."""
    whole = "".join(parts)
    start, end = "<mrow><mo>(</mo>", "<mo>)</mo></mrow>"
    if len(parts) == 1 and whole.startswith(start) and whole.endswith(end) and whole.count("<mo>(</mo>") == 1:
        return whole[len(start) : -len(end)]
    return whole


def mathml(formula: str) -> Markup:
    """The formula as a <math> element, which carries the plain notation too."""
    return Markup(
        f'<math displaystyle="true" alttext="{escape(formula)}"><mrow>{_Parser(formula).equation()}</mrow></math>'
    )
