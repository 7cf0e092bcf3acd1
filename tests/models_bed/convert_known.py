# SPDX-License-Identifier: MIT
"""`pyhobbit convert CHECKPOINT`, to which the vocabulary of the bed's checkpoints is a known one.

llama.cpp's converter knows vocabularies by a hash. This file stands in its place, too.

    python tests/models_bed/convert_known.py CHECKPOINT OUT
"""

import runpy
import sys
from pathlib import Path

from pyhobbit.native.paths import VENDOR_DIR


def as_pyhobbit(folder: Path, out: Path) -> None:
    """Converts with a low tier in q4_0."""
    from pyhobbit.convert import checkpoint
    from pyhobbit.convert.options import Options
    from pyhobbit.convert.pipeline import convert

    checkpoint._CONVERTER = Path(__file__)
    convert(Options(folder, low="q4_0", output=out, force=True))


def as_converter() -> None:
    """llama.cpp's converter with these arguments."""
    sys.path.insert(0, str(VENDOR_DIR))
    from conversion.base import TextModel

    TextModel.get_vocab_base_pre = lambda _self, _tokenizer: "gpt-2"
    runpy.run_path(str(VENDOR_DIR / "convert_hf_to_gguf.py"), run_name="__main__")


if __name__ == "__main__":
    if "--outtype" in sys.argv:
        as_converter()
    else:
        as_pyhobbit(Path(sys.argv[1]), Path(sys.argv[2]))
