"""Write README's code, and a subclass of each layer, as files for the type checker.

python tests/user_code/generate.py FOLDER
"""

import re
import sys
from pathlib import Path

import torch

import convgrad

ROOT = Path(__file__).parents[2]
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SUBCLASS = """
class {name}(convgrad.nn.{name}):
    def __init__(self) -> None:
        super().__init__({arguments})
"""


def files() -> dict[str, str]:
    """Return the content of each file by its name."""
    public = {n: getattr(convgrad.nn, n) for n in convgrad.nn.__all__}
    layers = [n for n, value in public.items() if isinstance(value, type) and issubclass(value, torch.nn.Module)]
    arguments = {n: "4, 6, 3" if "Conv" in n else "4, 6" if "Linear" in n else "4" for n in layers}
    classes = [SUBCLASS.format(name=n, arguments=arguments[n]) for n in layers]
    readme = PYTHON.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    return {"readme.py": "".join(readme), "subclasses.py": "import convgrad\n" + "".join(classes)}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, code in files().items():
        (folder / name).write_text(code, encoding="utf-8")
