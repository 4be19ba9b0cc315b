"""Lines per package, and files past the ceiling: lines are a budget."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

CEILING = 400
SOURCE = Path(__file__).parents[1] / "src" / "baton"


def main() -> None:
    """Print a table; files past the ceiling are named."""
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    long: list[str] = []
    for path in sorted(SOURCE.rglob("*.py")):
        count = len(path.read_text(encoding="utf-8").splitlines())
        inside = path.relative_to(SOURCE)
        package = inside.parts[0] if len(inside.parts) > 1 else "(top)"
        lines[package] += count
        files[package] += 1
        if count > CEILING:
            long.append(f"{inside}: {count} lines, more than {CEILING}")
    for package, count in sorted(lines.items()):
        print(f"{package:<12}{files[package]:>4} files{count:>8,} lines")
    print(f"{'total':<12}{files.total():>4} files{lines.total():>8,} lines")
    for line in long:
        print(line)


if __name__ == "__main__":
    main()
