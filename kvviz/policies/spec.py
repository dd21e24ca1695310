"""A policy as a short string, for command lines and links: `capkv`, `capkv:tau=2,allocation=adaptive,correction=1`.

Only what differs from the published setting is written.
"""

from __future__ import annotations

from typing import Any

from kvviz.policies.policy import Policy, policy

_WORDS = {"none": None, "true": True, "false": False}


def parse(text: str, **defaults: Any) -> Policy:
    """The policy of a string `name` or `name:option=value,...`.

    Args:
        defaults: options that are used where the string does not name them and the method has them, such as a common tau.

    Raises:
        ValueError: it cannot be read, or names an unknown method or option.
    """
    name, _, rest = text.strip().partition(":")
    options: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in rest.split(","))):
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(
                f"{part!r} in {text!r} is not option=value; write for example capkv:tau=2,allocation=adaptive."
            )
        options[key.strip()] = _value(value.strip())
    known = policy(name).settings()
    return policy(name, **{k: v for k, v in defaults.items() if k in known} | options)


def spec(chosen: Policy) -> str:
    """The string of a policy; `parse(spec(p)) == p`."""
    changes = [f"{key}={_text(value)}" for key, value in chosen.changes().items()]
    return chosen.name + (":" + ",".join(changes) if changes else "")


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _text(value: Any) -> str:
    return (
        str(value).lower()
        if value is None or isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )
