"""Print one of README's commands: the shell block after the comment `<!-- command: NAME -->`."""

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def main(name: str) -> None:
    found = re.findall(rf"<!-- command: {name} -->\s*```sh\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    if len(found) != 1:
        sys.exit(f"README.md has {len(found)} blocks marked 'command: {name}' instead of one")
    print(found[0], end="")


if __name__ == "__main__":
    main(sys.argv[1])
