"""Print the requirements of a server's wheel without torch's packages: `... WHEEL > requirements.txt`.

Uses only the standard library, since it runs in the server's own environment.
"""

import re
import sys
import zipfile

TORCH = re.compile(r"torch(audio|vision|codec)?\b", re.I)


def requirements(wheel: str) -> list[str]:
    """The wheel's requirements, without those of extras."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    required = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    return [line for line in required if "extra ==" not in line and not TORCH.match(line)]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1])))
