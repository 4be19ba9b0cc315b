"""What the scripts' flags may be; argparse names the flag and what is wrong with it."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """A number of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 1 or more")
    return int(text)
