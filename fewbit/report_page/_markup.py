"""HTML built from values. Every string is escaped unless this module made it."""

import html
import re
from typing import Any

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_VOID = frozenset({"meta", "input", "br", "hr"})


class Markup(str):
    """A string that is HTML already."""

    __slots__ = ()


def text(value: Any) -> Markup:
    """A value as text: nothing in it is markup, and nothing in it is unprintable.

    >>> text('<b>&'), text('a\\x00b')
    ('&lt;b&gt;&amp;', 'a\ufffdb')
    """
    if isinstance(value, Markup):
        return value
    return Markup(html.escape(_CONTROL.sub("\ufffd", str(value)), quote=True))


def tag(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """An element. `class_` and `data_value` are written as in HTML; None leaves an attribute out.

    >>> tag('td', '<up>', class_='name', data_value=3)
    '<td class="name" data-value="3">&lt;up&gt;</td>'
    """
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{text(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(*children)}</{name}>")


def color_key(**meanings: str) -> Markup:
    """What the colours of a chart mean, by the names that page.css has for them.

    >>> color_key(before='float numbers')
    '<ul class="key"><li><i class="k-before"></i>float numbers</li></ul>'
    """
    items = [tag("li", tag("i", class_=f"k-{color}"), said) for color, said in meanings.items()]
    return tag("ul", items, class_="key")


def join(*parts: Any) -> Markup:
    """Parts one after the other; lists are spread."""
    out = []
    for part in parts:
        if isinstance(part, list | tuple):
            out.append(join(*part))
        elif part is not None:
            out.append(text(part))
    return Markup("".join(out))
