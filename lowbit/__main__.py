"""``python -m lowbit -m MODULE ...`` runs another program with lowbit imported, so that its transformers reads quantized models.

    python -m lowbit -m lm_eval --model hf --model_args pretrained=OUT --tasks arc_easy

Anything else after ``python -m lowbit`` is the command line of lowbit itself.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys

from .command import main


def _run(arguments: list[str]) -> None:
    """What ``python -m`` does with ``arguments``."""
    if not arguments:
        _refuse("-m needs the name of a module, as in python -m lowbit -m lm_eval")
    try:
        found = importlib.util.find_spec(arguments[0])
    except ModuleNotFoundError:  # the package that it would be in
        found = None
    if found is None:
        _refuse(f"there is no module {arguments[0]}")
    sys.argv = arguments  # whose first runpy replaces by the module's file
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


def _refuse(why: str) -> None:
    print(f"lowbit: error: {why}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    if sys.argv[1:2] == ["-m"]:
        _run(sys.argv[2:])
    else:
        main()
