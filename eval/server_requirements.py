"""What a server's wheel requires, without the packages that would bring another torch: `... WHEEL > requirements.txt`.

Needs nothing but Python, since it runs in the server's own environment.
"""

import re
import sys
import zipfile

TORCH = re.compile(r"torch(audio|vision|codec)?\b", re.I)


def requirements(wheel: str) -> list[str]:
    """The wheel's own requirements, extras left out."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    found = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    return [line for line in found if "extra ==" not in line and not TORCH.match(line)]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1])))
