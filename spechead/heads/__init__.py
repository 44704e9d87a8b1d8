"""The trained heads. A new head is one file in this folder and one line in HEADS."""

from spechead.heads.base import Head
from spechead.heads.eagle import Eagle
from spechead.heads.eagle3 import Eagle3
from spechead.heads.hydra import Hydra
from spechead.heads.medusa import Medusa

HEADS: dict[str, type[Head]] = {"eagle": Eagle, "eagle3": Eagle3, "hydra": Hydra, "medusa": Medusa}
